"""Dense checkpoints to a mixture of experts and back: fine-grained experts beside a shared one (docs/upcycling.md)."""
