"""`python -m megaponder`, the form for torchrun's -m."""

if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    from megaponder.cli.main import command

    command()
