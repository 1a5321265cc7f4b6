"""The one exception that is a user's mistake and not a bug: it ends the program with exit code 2 and no traceback."""


class UserError(Exception):
    """Something the user can mend.  The message is one sentence: field or file, value, rule, nearest legal value."""


class ConfigError(UserError):
    """A field of the configuration breaks a rule."""

    def __init__(self, field: str, value: object, rule: str, fix: str):
        super().__init__(f"{field} = {value!r}: {rule}; {fix}.")
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
