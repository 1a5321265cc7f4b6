from torch import nn

from megaponder.decoding.backbone import linear
from megaponder.decoding.method import DecodingMethod


class Halfway(DecodingMethod):
    name, training_only = "halfway", ("cost_weight",)

    def modules(self):
        return {"gate": nn.Linear(self.config.hidden_size, 1)}

    def hidden(self, model, ids, run):
        x = model.model.embed(model.model.embed_tokens(ids), run.positions)
        h = model.model.norm(model.model.stack(x, 0, run.view(0)))
        x = x + linear(model.method["gate"], h).sigmoid().to(h.dtype) * h
        return model.model.norm(model.model.stack(x, 1, run.view(1)))
