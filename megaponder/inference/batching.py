"""Depth-wise batching: many texts at once, where every step runs one pass of every text, whichever pass that is.

A row that halts takes its next token in the very next step, so no row waits for deeper ones, and a text that ends makes
room for the next of the queue.  A row takes one slot of keys and values a step (with a budget, in the end one that it
has): memory is the sum of depths, in pages.  Prompts run all but their last token in chunks, each pass with the rows
that go on: beforehand where steps are captured or compiled, else as further rows of other texts' steps.  Where every
row reads all rows before it, they run token by token, as texts do.

On a GPU the layer is compiled, steps are captured as CUDA graphs, by number of rows and of keys, and nothing waits for
the host between looks at which texts have ended.

Shapes: B rows (texts in work), P passes, T tokens of the longest text, n rows of a step, k keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.backbone import feature, wide
from megaponder.decoding.slots import Slots
from megaponder.decoding.steps import State
from megaponder.errors import UserError
from megaponder.inference.book import PAGE, Book, begin_step, compiled_steps, end_step
from megaponder.inference.one_row import Stack, has_kernels
from megaponder.inference.prompts import Prompts

KEYS = 256
"""Captured steps read a multiple of so many keys."""
LOOK = 8
"""Steps on a GPU between looks at which texts have ended."""
CHUNK = {"cuda": 4096, "cpu": 512}
"""Rows of a prompt's pass."""
PADDED = "give its prompts as arguments instead (in Python without rows), which run as one padded batch"


@dataclass(frozen=True)
class Continuation:
    """What followed a prompt."""

    tokens: list[int]
    """New tokens, the end-of-document token included."""
    depths: list[int]
    """Passes that each token of prompt and continuation ran; the last one runs none."""


@dataclass
class Request:
    """A prompt in the queue, with what was generated before it had to give way."""

    number: int
    text: list[int]
    prompt: int
    """Tokens of the prompt."""
    most: int
    """Tokens of the text at its longest."""
    depths: list[int] = field(default_factory=list)


@dataclass
class Counts:
    """What the batching did."""

    steps: int = 0
    rows: int = 0
    """Row-passes of steps."""
    prompt_rows: int = 0
    """Row-passes of prompts."""
    beside: int = 0
    """Those of them that ran beside the rows of steps."""
    preempted: int = 0
    graphs: int = 0
    most_slots: int = 0
    """The most slots in use at once: the sum of depths."""
    most_pages: int = 0


class Pages(Slots):
    """Slots in pages of a fixed pool; row B is a dump for rows that exist only to fill a captured step."""

    def __init__(self, model: Any, rows: int, passes: int, tokens: int, pages: int, merge: bool, budget: int):
        device, config = model.device, model.config
        super().__init__(0, merge, device=device, budget=budget)
        self.table = torch.full((rows + 1, passes, tokens), -1, dtype=torch.long, device=device)
        self.free = list(range(pages, 0, -1))  # page 0 is the dump's
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        most = -(-passes * tokens // PAGE)
        self.page = torch.zeros(rows + 1, most, dtype=torch.long, device=device)
        """[B + 1, ...] pages of each row, in the order of its slots."""
        self.cursor = [0] * rows
        """Slots that each row has used."""
        self.pass_of = torch.zeros((pages + 1) * PAGE, dtype=torch.int8, device=device)
        """The pass that each slot belongs to."""
        shape = ((pages + 1) * PAGE, config.num_key_value_heads, config.head_size)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(config.num_hidden_layers)]
            for _ in range(2)
        )
        """By layer, [slots, groups, d]: apart, as kernels read them."""

    def reserve(self, row: int, slots: int) -> bool:
        """Give a row pages for so many slots in all; False if there are not enough."""
        lacking = min(-(-slots // PAGE), self.page.shape[1]) - len(self.owned[row])
        if lacking > len(self.free):
            return False
        if lacking > 0:
            new = [self.free.pop() for _ in range(lacking)]
            begin = len(self.owned[row])
            self.owned[row] += new
            self.page[row, begin : begin + lacking] = torch.tensor(new, device=self.page.device)
        return True

    def trim(self, row: int, slots: int) -> None:
        """Take back the pages of a row that so many slots do not need."""
        keep = -(-slots // PAGE)
        self.free += reversed(self.owned[row][keep:])
        del self.owned[row][keep:]

    def release(self, row: int) -> None:
        """Take a row's pages back."""
        self.trim(row, 0)
        self.cursor[row] = 0

    def allot(self, index: int, seq: Tensor, token: Tensor, weight: Tensor | None = None) -> Tensor:
        if 0 < self.budget <= index:
            return self.table[seq, index - self.budget, token]
        order = []
        for row, count in zip(*(x.tolist() for x in torch.unique_consecutive(seq, return_counts=True)), strict=True):
            order.append(torch.arange(self.cursor[row], self.cursor[row] + count, device=seq.device))
            self.cursor[row] += count
        at = torch.cat(order) if order else seq
        slots = self.page[seq, at // PAGE] * PAGE + at % PAGE
        self.pass_of[slots] = index
        if self.merge:
            self.table[seq, index, token] = slots
        else:
            self.table[seq[:, None], self.readers(index), token[:, None]] = slots[:, None]
        return slots

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, ...]:
        return self.keys[layer][table], self.values[layer][table]


class DepthBatch:
    """Continues texts with a model of `megaponder.decoding` whose method has a `stepwise` form.

    rows: texts in work at once.  tokens: of the longest text.  pages: of keys and values, 16 slots each; by default
    enough for every row at full depth.  With fewer, texts give way when there are none left, and go on later.
    graphs: capture steps as CUDA graphs; compiled: run layers through torch.compile; kernels: attention, and Llama's
    layers for one text, by Triton kernels (all by default on GPUs).  given: `passes`, `threshold`, `kv_budget`, as of
    the model's `forward`.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 32,
        tokens: int | None = None,
        pages: int | None = None,
        eos: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        graphs: bool | None = None,
        compiled: bool | None = None,
        kernels: bool | None = None,
        **given: Any,
    ):
        if wrong := given.keys() - set(model.ponder.arguments):
            raise TypeError(f"method {model.ponder.name} takes no {', '.join(sorted(wrong))}")
        form: Any = model.ponder.using(given).stepwise()
        for name, kind, reason in (
            ("depth_attention", "Depth-Attention", "a pass needs the layers of earlier passes"),
            ("freqkv", "FreqKV", "pages keep keys as they are"),
            ("moe", "a mixture of experts", "the rows of an expert change from step to step"),
        ):
            if feature(model.config, name):
                raise UserError(f"a model with {kind} cannot be batched by depth, since {reason}; {PADDED}.")
        if form is None:
            why = model.ponder.using(given).why_not_batched
            raise UserError(f"method {model.ponder.name} cannot be batched by depth: {why}; {PADDED}.")
        method = form.using(given)
        self.model, self.method = model, method
        for name in ("gates", "budget", "router"):  # computed in FP32: cast once instead of in every step
            if name in model.method and model.dtype.itemsize < 4:
                model.method[name].float()
        self.rows, self.eos, self.sampling = rows, eos, (temperature, top_k, top_p)
        self.tokens = model.config.max_position_embeddings if tokens is None else tokens
        self.window = feature(model.config, "attention_window")
        if self.window and method.merge:
            raise UserError(f"method {model.ponder.name} with a sliding window cannot be batched by depth.")
        self.deepest, self.budget, self.counts = self.method.deepest(), self.method.kv_budget, Counts()
        self.slots_each = min(self.deepest, self.budget or self.deepest)
        cuda = model.device.type == "cuda"
        self.graphs = cuda if graphs is None else graphs
        self.look, self.chunk = (LOOK, CHUNK["cuda"]) if cuda else (1, CHUNK["cpu"])
        each = -(-self.tokens * self.slots_each // PAGE)
        pages = rows * each if pages is None else pages
        self.slots = Pages(model, rows, self.deepest, self.tokens, pages, method.merge, self.budget)
        self.compiled = cuda if compiled is None else compiled
        self._stack = Stack.of(model, self.compiled, has_kernels(model) if kernels is None else kernels)
        self.rides = not self.graphs and not self.compiled
        """Whether prompts run beside the rows of steps."""
        self.prompts: list[Prompts] = []
        """Those that have not run to the end."""
        self.waiting: dict[int, Request] = {}
        """Texts of their rows."""
        self._steps: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        device = model.device
        text = torch.zeros(rows + 1, self.tokens + 1, dtype=torch.long, device=device)
        at, index, used, known, most = (torch.zeros(rows + 1, dtype=torch.long, device=device) for _ in range(5))
        live, pages_of = torch.zeros(rows + 1, dtype=torch.bool, device=device), self.slots
        depth = torch.zeros(rows + 1, self.tokens, dtype=torch.long, device=device)
        self.book = Book(
            text, depth, at, index, used, known, most, live, pages_of.page, pages_of.table, pages_of.pass_of
        )
        if method.weighs:
            self.slots.weight = torch.zeros(len(self.slots.pass_of), device=device)
        self._ends = compiled_steps() if self.compiled else (begin_step, end_step)
        first = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.state: State = self.method.begin(model, first, first)
        self.lanes: dict[int, Tensor] = {}
        self._pass: dict[int, int] = {}  # the next pass of each row's token, where no token halts

    def run(self, prompts: Iterable[list[int]], max_new_tokens: int) -> list[Continuation]:
        """Continuations in the order of the prompts, each of at least one token."""
        return list(self.stream(prompts, max_new_tokens))

    @torch.no_grad()
    def stream(self, prompts: Iterable[list[int]], max_new_tokens: int) -> Iterator[Continuation]:
        """The same, each as soon as it and those before it have ended."""
        queue = deque(Request(i, list(p), len(p), len(p) + max_new_tokens) for i, p in enumerate(prompts))
        out: dict[int, Continuation] = {}
        work: dict[int, Request] = {}
        told = 0
        for request in queue:
            if not 1 <= request.prompt < request.most <= self.tokens:
                raise UserError(
                    f"a prompt of {request.prompt} tokens and {max_new_tokens} new ones exceed the longest text of "
                    f"{self.tokens}; request fewer."
                )
        self.prompts.clear()
        while queue or work or self.prompts:
            self._admit(queue, work)
            if not work or not self.rides:
                self._run_prompts()
            self._begin(work)
            if work:
                self._make_room(queue, work)
                self._advance(sorted(work))
                self._collect(work, out)
            while told in out:
                yield out.pop(told)
                told += 1

    def _admit(self, queue: deque[Request], work: dict[int, Request]) -> None:
        """Fill free rows from the queue."""
        new: dict[int, Request] = {}
        for row in range(self.rows):
            if not queue or row in work or row in self.waiting:
                continue
            request = queue[0]
            if not self.slots.reserve(row, (len(request.text) - 1) * self.slots_each + self.look):
                if not work and not new and not self.waiting:
                    raise UserError(
                        f"a prompt of {len(request.text)} tokens needs more than the {len(self.slots.free)} pages of "
                        "keys and values that there are; give more."
                    )
                break
            new[row] = queue.popleft()
            self.book.text[row, : len(request.text)] = torch.tensor(request.text, device=self.book.text.device)
            self.slots.table[row] = -1
        self.waiting |= new
        short = [row for row in new if self._ahead(row) == 0]  # these wait for no others
        for rows in (short, [row for row in new if row not in short]):
            if rows:
                texts = {row: self.waiting[row].text[: self._ahead(row)] for row in rows}
                given = (self.model, self.method, self.slots, texts, self.chunk, self.book.depth)
                self.prompts.append(Prompts(*given))

    def _ahead(self, row: int) -> int:
        """Tokens of a text that run before its steps."""
        return 0 if self.method.every else len(self.waiting[row].text) - 1

    def _run_prompts(self) -> None:
        """Run prompts to the end, without steps."""
        for prompts in self.prompts:
            prompts.run()

    def _begin(self, work: dict[int, Request]) -> None:
        """Take up the texts whose prompts have run."""
        ended = [prompts for prompts in self.prompts if prompts.front is None]
        if not ended:
            return
        self.prompts = [prompts for prompts in self.prompts if prompts.front is not None]
        self.counts.prompt_rows += sum(prompts.passes for prompts in ended)
        new = [row for prompts in ended for row in prompts.rows]
        last = [self._ahead(row) for row in new]
        for row in new:
            work[row] = self.waiting.pop(row)
            self.slots.trim(row, self.slots.cursor[row] + self.look)  # tokens that halted need less than was reserved
        rows = torch.tensor(new, device=self.book.text.device)
        used, most = ([self.slots.cursor[row] for row in new], [work[row].most for row in new])
        known = [len(work[row].text) for row in new]
        book = self.book
        for tensor, values in ((book.at, last), (book.used, used), (book.known, known), (book.most, most)):
            tensor[rows] = torch.tensor(values, device=rows.device)
        self.book.passed[rows], self.book.live[rows] = 0, True
        self._at = self.book.at.tolist()
        self._pass |= dict.fromkeys(new, 0)

    def _make_room(self, queue: deque[Request], work: dict[int, Request]) -> None:
        """Pages for the next steps; where none are left, the texts that hold fewest go back to the queue's front."""
        for row in sorted(work, key=lambda r: -self.slots.cursor[r]):
            while row in work and not self.slots.reserve(row, self.slots.cursor[row] + self.look):
                if self.prompts:  # then they need no more than what they have, and rows of theirs can give way, too
                    self._run_prompts()
                    self._begin(work)
                    continue
                weakest = min(work, key=lambda r: self.slots.cursor[r])
                if weakest == row and len(work) == 1:
                    raise UserError("one text needs more pages of keys and values than there are; give more.")
                request = work.pop(weakest)
                at = int(self.book.at[weakest])
                request.text = self.book.text[weakest, : max(at + 1, len(request.text))].tolist()
                self.book.live[weakest] = False
                self.slots.release(weakest)
                queue.appendleft(request)
                self.counts.preempted += 1
        slots = self.slots
        used, coming = ({row: slots.cursor[row] for row in rows} for rows in (work, self.waiting))
        self.counts.most_slots = max(self.counts.most_slots, sum(used.values()) + sum(coming.values()))
        held = sum(len(slots.owned[row]) for row in used) + sum(-(-count // PAGE) for count in coming.values())
        self.counts.most_pages = max(self.counts.most_pages, held)

    def _collect(self, work: dict[int, Request], out: dict[int, Continuation]) -> None:
        """Hand out texts that have ended, and free their rows."""
        live, at, used = torch.stack([self.book.live.long(), self.book.at, self.book.used]).tolist()
        self._at = at
        for row in list(work):
            self.slots.cursor[row] = used[row]
            if live[row]:
                continue
            request = work.pop(row)
            words = self.book.text[row, request.prompt : at[row] + 1].tolist()
            out[request.number] = Continuation(words, self.book.depth[row, : at[row]].tolist())
            self.slots.release(row)

    def _advance(self, rows: list[int]) -> None:
        """`look` steps of these rows."""
        longest = self.look + max(self.slots.cursor[row] if self.slots.merge else self._at[row] + 1 for row in rows)
        self.counts.steps += self.look
        self.counts.rows += self.look * len(rows)
        reads = [self._read(rows) for _ in range(self.look)]
        if not self.graphs:
            for read in reads:
                self._step(torch.tensor(rows, device=self.book.text.device), longest, read)
            return
        size = 1 << (len(rows) - 1).bit_length()
        keys = -(-longest // KEYS) * KEYS
        lane = self.lanes.setdefault(size, torch.empty(size, dtype=torch.long, device=self.book.text.device))
        lane.copy_(torch.tensor(rows + [self.rows] * (size - len(rows))))
        for read in reads:
            if (size, keys, read) not in self._steps:
                self._capture(lane, size, keys, read)
            self._steps[size, keys, read].replay()

    def _read(self, rows: list[int]) -> bool:
        """Whether a token of these rows may end in the next step: the head is left out if none does."""
        if self.method.halts:
            return True
        last = any(self._pass[row] == self.deepest - 1 for row in rows)
        self._pass |= {row: (self._pass[row] + 1) % self.deepest for row in rows}
        return last

    def _capture(self, lane: Tensor, size: int, keys: int, read: bool) -> None:
        before = [x.clone() for x in self._memory()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(lane, keys, read)
        torch.cuda.current_stream().wait_stream(stream)
        for x, old in zip(self._memory(), before, strict=True):
            x.copy_(old)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(lane, keys, read)
        self._pool = graph.pool() if self._pool is None else self._pool
        self._steps[size, keys, read] = graph
        self.counts.graphs += 1

    def _memory(self) -> list[Tensor]:
        """What a step changes, but for slots that are written again before they are read."""
        return [*self.book, *(self.state[name] for name in sorted(self.state))]

    def _step(self, lane: Tensor, keys: int, read: bool) -> None:
        """One pass of the rows `lane` [n], each its own, which read at most `keys` keys; `read`: tokens may end."""
        model, method = self.model, self.method
        begin, end = self._ends
        step = begin(self.book, lane, keys, method.merge, method.every, self.window, self.budget)
        at, index = step.at, step.passed
        state = {name: x[lane] for name, x in self.state.items()}
        for name, x in method.begin(model, step.word, at).items():
            first = (index == 0).view(-1, *[1] * (x.dim() - 1))
            state[name] = torch.where(first, x, state[name])
        weight = self.slots.weight
        if weight is not None:
            weight[step.slot] = state["key"].to(weight.dtype)
            weight = weight[step.found]
        riders, n = self.prompts if self.rides else [], len(lane)
        fronts = [prompts.front for prompts in riders if prompts.front is not None]
        beside = [(len(prompts.front.left), prompts.view()) for prompts in riders if prompts.front is not None]
        if fronts:
            state = {name: torch.cat([x, *(front.state[name] for front in fronts)]) for name, x in state.items()}
            at = torch.cat([at, *(front.at for front in fronts)])
            index = torch.cat([index, *(torch.full_like(front.left, front.index) for front in fronts)])
        h = self._stack(state["x"], at, self.slots, step.slot, step.found, step.mask, weight, beside)
        go_on = torch.as_tensor(method.leave(model, index, h, state, at), device=h.device)
        if read and method.mixes:  # those that end need the head's logits, and those that go on, too: once for all
            state["head"] = wide(model.lm_head(state["out"]))
        word = self._sample({name: x[:n] for name, x in state.items()}, go_on[:n]) if read else step.word
        self._enter(index, state, go_on)
        begins = n
        for prompts, (count, _) in zip(riders, beside, strict=True):
            part, begins = slice(begins, begins + count), begins + count
            prompts.sift(go_on[part], {name: state[name][part] for name in (*self.state, "out")})
        self.counts.beside += begins - n
        for name, x in self.state.items():
            x[lane] = state[name][:n].to(x.dtype)
        end(self.book, lane, step, go_on[:n], word, self.eos)

    def _sample(self, state: State, go_on: Tensor) -> Tensor:
        """[n] the next token of rows that halt."""
        if go_on.device.type != "cpu":
            return self._choose(state["head"] if "head" in state else wide(self.model.lm_head(state["out"])))
        rows = (~go_on).nonzero()[:, 0]  # there is no waiting on a CPU, so only the rows that need it
        words = torch.zeros_like(go_on, dtype=torch.long)
        if not len(rows):
            return words
        logits = state["head"][rows] if "head" in state else wide(self.model.lm_head(state["out"][rows]))
        return words.index_copy(0, rows, self._choose(logits))

    def _choose(self, logits: Tensor) -> Tensor:
        temperature, top_k, top_p = self.sampling
        if temperature == 0:
            return logits.argmax(-1)
        logits = logits / temperature
        if 0 < top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
        shares = logits.softmax(-1)
        if top_p < 1:  # the likeliest tokens that together reach top_p
            order = shares.sort(dim=-1, descending=True)
            kept = order.values.cumsum(-1) - order.values < top_p
            shares = shares * torch.zeros_like(kept).scatter(-1, order.indices, kept)
        return (shares / torch.empty_like(shares).exponential_()).argmax(-1)

    def _enter(self, index: Tensor, state: State, go_on: Tensor) -> None:
        """What enters the next pass of rows that go on; on a CPU others are left out."""
        if go_on.device.type != "cpu":
            before = state["x"]
            self.method.enter(self.model, index, state)
            state["x"] = torch.where(go_on[:, None], state["x"], before)
            return
        rows = go_on.nonzero()[:, 0]
        if len(rows):
            some = {name: x[rows] for name, x in state.items()}
            self.method.enter(self.model, index[rows], some)
            state["x"] = state["x"].index_copy(0, rows, some["x"])
