"""Pondering language models in vLLM: exports of megaponder with the methods loop, ponderlm and adaponderlm."""


def register() -> None:
    """What vLLM calls at its start (entry point `vllm.general_plugins`)."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("MegaponderForCausalLM", "megaponder_vllm.model:MegaponderForCausalLM")
