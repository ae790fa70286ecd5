"""The numpy tower: the whole model in float32, short and exact. The law for the CUDA tower; the backend without a GPU.

    hidden = embed[tokens];  each layer adds mixer(norm(hidden)), then mlp(norm(hidden));  logits = norm(hidden) head^T

One `Step` in, one `Output` out. Dense products take the rows of all sequences at once; attention and the delta rule take
one sequence at a time. The tower owns the arrays that KVPool and StateSlots only count:

    kv      f32 [2, L, P, 128, G, hd]     keys (normed, rotated) and values of the L full layers, the draft head's last
    S       f32 [layers, slots, Nv, dk, dv], window f32 [layers, slots, taps-1, C]         of the linear layers

Who calls: engine.py. Proven by tests/test_cpu.py against vectors made with transformers, and tests/test_layouts.py.
"""
import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from ..kvpool import PAGE
from ..step import Output, Step, ancestors
from .cpu_attention import attend, attend_few, read_rows, write_rows
from .cpu_delta import causal_conv, delta_chunked, delta_replay, delta_step, delta_tree, replay_stepwise, tree_stepwise
from .cpu_weights import DeltaNet, read_draft_head, read_layer
from .panels import Panels

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # malloc.h
FEW = 32                    # rows of a draft tree at most: those attend in the form whose bits do not depend on the tree


def sigmoid(x):
    return 0.5 * np.tanh(0.5 * x) + 0.5     # tanh cannot overflow


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(np.float32(0), x)


def rms_unit(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x * (1.0 / np.sqrt(np.vecdot(x, x)[..., None] / np.float32(x.shape[-1]) + np.float32(eps)))


def l2_unit(x):
    """x / sqrt(sum(x^2) + 1e-6) over the last axis; the 1e-6 is the model's constant, not rms_norm_eps."""
    return x * (1.0 / np.sqrt(np.vecdot(x, x)[..., None] + np.float32(1e-6)))


def tune_process(threads: int) -> int:
    """Set what numpy's speed depends on for the whole process; nothing here changes a result. Returns the threads.

    threads: of BLAS and of a tower's own products. 0 takes one for each usable core, at most 4: beyond that they wait for
    each other longer than the products of a small model take.
    Freed memory is kept for the next step instead of going back to the system: fresh pages cost a prefill 40 % of its time.
    """
    threads = threads or min(4, len(os.sched_getaffinity(0)))
    threadpool_limits(threads, "blas")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)       # glibc's; other C libraries go without
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 25)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
    return threads


class CpuTower:
    """`pages` pages of KV and `slots` recurrent states for the model of `checkpoint` (model/weights.py).

    stepwise: a tree's rows and their replay take the delta rule a token at a time, as plain decoding does: what a sequence
    leaves behind is then that of plain decoding to the last bit, for twice a round's time. Otherwise to rounding.
    raw_hidden: hiddens are returned, and taken by the draft head, as they are before the last norm.
    draft_rows: ids that the draft head chooses from, the lowest; 0: all."""
    longest_chain = 0           # of drafts in one go: here they can as well be asked for level by level
    clock = staticmethod(time.thread_time)      # by which steps are compared: other programs on the machine do not count

    def __init__(self, checkpoint, pages: int, slots: int, threads: int = 1, stepwise: bool = False,
                 raw_hidden: bool = False, draft_rows: int = 0):
        c, self.stepwise, self.raw_hidden = checkpoint.config, stepwise, raw_hidden
        self.config, self.workers = c, ThreadPoolExecutor(threads) if threads > 1 else None
        self.embed = checkpoint.f32("model.embed_tokens.weight")
        self.head = Panels(self.embed if c.tie_word_embeddings else checkpoint.f32("lm_head.weight"))
        self.norm = 1 + checkpoint.f32("model.norm.weight")
        kinds = tqdm(c.layer_types, desc="loading", unit="layer", leave=False, disable=None)    # silent without a terminal
        self.layers = [read_layer(checkpoint, f"model.layers.{i}.", kind) for i, kind in enumerate(kinds)]
        self.draft_rows = self.head.first(draft_rows) if 0 < draft_rows < c.vocab_size else self.head
        self.mtp = read_draft_head(checkpoint) if checkpoint.has_mtp else None
        full, linear = len(c.full_layers), len(c.linear_layers)
        shape = (2, full + (self.mtp is not None), pages, PAGE, c.num_key_value_heads, c.head_dim)
        self.kv = np.zeros(shape, np.float32)           # zeros, not empty: the system hands them out page by page
        self.S = np.zeros((linear, slots, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim),
                          np.float32)
        self.window = np.zeros((linear, slots, c.linear_conv_kernel_dim - 1, c.conv_channels), np.float32)
        self.replay: dict[int, list] = {}               # slot: per linear layer (mix, k, v, g, beta) of its last tree
        self.inverse_frequency = (c.rope_theta ** (-np.arange(0, c.rotary_dim, 2) / c.rotary_dim)).astype(np.float32)

    def attach(self) -> None:
        """Let the calling thread run the tower: any may."""

    # ------------------------------------------------------------------ state, as the pools direct
    def clear_slot(self, slot: int) -> None:
        """The state before the first token."""
        self.S[:, slot], self.window[:, slot] = 0, 0
        self.replay.pop(slot, None)

    def copy_slot(self, source: int, target: int) -> None:
        assert source not in self.replay, "an open tree is accepted or dropped before its state is copied"
        self.S[:, target], self.window[:, target] = self.S[:, source], self.window[:, source]
        self.replay.pop(target, None)

    def copy_page(self, source: int, target: int) -> None:
        self.kv[:, :, target] = self.kv[:, :, source]

    def export_state(self, slot: int, pages: list[int], length: int) -> dict[str, np.ndarray]:
        """All of one sequence's past: kv f32 [2, L, length, G, hd], S and window of its slot. For the disk."""
        rows = self.kv[:, :, pages].reshape(self.kv.shape[:2] + (-1,) + self.kv.shape[4:])
        return {"kv": rows[:, :, :length], "S": self.S[:, slot], "window": self.window[:, slot]}

    def import_state(self, slot: int, pages: list[int], arrays: dict[str, np.ndarray]) -> bool:
        """Put an exported past into a slot and pages; False, with nothing changed, if its shapes are another model's."""
        kv = arrays.get("kv")
        if kv is None:                          # another tower's keys
            return False
        wanted = {"kv": self.kv.shape[:2] + kv.shape[2:3] + self.kv.shape[4:], "S": self.S[:, slot].shape,
                  "window": self.window[:, slot].shape}
        if any(arrays[name].shape != shape for name, shape in wanted.items()) or kv.shape[2] > len(pages) * PAGE:
            return False
        at = np.arange(kv.shape[2])
        self.kv[:, :, np.array(pages)[at // PAGE], at % PAGE] = kv
        self.S[:, slot], self.window[:, slot] = arrays["S"], arrays["window"]
        self.replay.pop(slot, None)
        return True

    def weight_bytes(self) -> int:
        """Bytes of the main model's weights, the draft head not counted."""
        arrays = [self.embed, self.norm, self.head]
        for layer in self.layers:
            arrays += [getattr(layer, f.name) for f in fields(layer) if f.name != "mixer"]
            arrays += [getattr(layer.mixer, f.name) for f in fields(layer.mixer)]
        return sum(a.nbytes for a in arrays)

    # ------------------------------------------------------------------ the forward passes
    def forward(self, step: Step) -> Output:
        """Run the step: commit the accepted rows, then compute its own."""
        for r in range(step.sequences):
            self.commit(int(step.slots[r]), step.pages[r], int(step.lengths[r]), step.accepted[r])
        eps, hidden = self.config.rms_norm_eps, self.embed[step.tokens]
        cos, sin = self.rope_table(step.positions)
        linear = full = 0
        for layer in self.layers:
            x = rms_unit(hidden, eps) * layer.norm_in
            if isinstance(layer.mixer, DeltaNet):
                hidden += self.delta_net(x, layer.mixer, step, linear)
                linear += 1
            else:
                hidden += self.attention(x, layer.mixer, step, full, cos, sin)
                full += 1
            hidden += self.mlp(hidden, layer)
        return self.read_out(hidden, self.norm, step)

    def forward_mtp(self, step: Step, hidden: np.ndarray) -> Output:
        """The draft head over pairs (hidden of position p, token p+1): step.tokens are the tokens p+1, hidden f32 [T, D]
        is the final-normed hidden of p (see raw_hidden), from the main model or from this head's own Output.

        step.lengths count this head's own KV rows; commit, slots and accepted mean nothing here. Rows that are no output
        leave key and value alone, no hidden.
        """
        m, eps = self.mtp, self.config.rms_norm_eps
        pair = np.concatenate([rms_unit(self.embed[step.tokens], eps) * m.norm_embedding,
                               rms_unit(hidden, eps) * m.norm_hidden], -1)
        x = m.fc(pair, self.workers)
        cos, sin = self.rope_table(step.positions)
        y = x[step.outputs]
        y += self.attention(rms_unit(x, eps) * m.layer.norm_in, m.layer.mixer, step, len(self.kv[0]) - 1, cos, sin,
                            step.outputs)
        y += self.mlp(y, m.layer)
        normed = rms_unit(y, eps) * m.norm
        x[step.outputs] = y if self.raw_hidden else normed
        return Output(self.draft_rows(normed), x if step.hidden else None)

    def read_out(self, hidden, norm, step) -> Output:
        rows = rms_unit(hidden if step.hidden else hidden[step.outputs], self.config.rms_norm_eps) * norm
        return Output(self.head(rows[step.outputs] if step.hidden else rows, self.workers),
                      (hidden if self.raw_hidden else rows) if step.hidden else None)

    def mlp(self, hidden, layer):
        gate_up = layer.gate_up(rms_unit(hidden, self.config.rms_norm_eps) * layer.norm_post, self.workers)
        F = self.config.intermediate_size
        return layer.down(silu(gate_up[:, :F]) * gate_up[:, F:], self.workers)

    # ------------------------------------------------------------------ full attention
    def rope_table(self, positions):
        """cos and sin f32 [T, 1, rotary_dim/2]; the angle is a float32 product, as in the reference."""
        angle = positions[:, None].astype(np.float32) * self.inverse_frequency
        return np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(self, x, cos, sin):
        """Rope on the first rotary_dim of x [T, heads, hd], pairs half a width apart."""
        half = cos.shape[-1]
        a, b = x[..., :half], x[..., half:2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], -1)

    def attention(self, x, w, step, layer, cos, sin, wanted=slice(None)):
        """Of rows x, those of `wanted` (ascending) attend; all leave key and value. Returns what is added to the wanted."""
        c, T, eps = self.config, len(x), self.config.rms_norm_eps
        H, G, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qg = w.qg(x[wanted], self.workers).reshape(-1, 2 * H, hd)           # [q, gate of head 0 | of head 1 ...]
        kv = w.kv(x, self.workers).reshape(T, 2 * G, hd)                    # [k | v]
        q, gate, k, v = qg[:, ::2], qg[:, 1::2], kv[:, :G], kv[:, G:]
        q = self.rotate(rms_unit(q, eps) * w.q_norm, cos[wanted], sin[wanted]) * np.float32(hd ** -0.5)
        k = self.rotate(rms_unit(k, eps) * w.k_norm, cos, sin)
        out = np.empty((len(q), H, hd), np.float32)
        which = np.arange(T)[wanted]
        for r in range(step.sequences):
            rows, pages = step.span(r), step.pages[r]
            length = int(step.lengths[r]) + len(step.accepted[r])
            write_rows(self.kv[:, layer], pages, length, k[rows], v[rows])
            mine = slice(*np.searchsorted(which, (rows.start, rows.stop)))
            keys, values = read_rows(self.kv[:, layer], pages, length + rows.stop - rows.start)
            parents, asking = step.parents[rows], which[mine] - rows.start
            if len(asking) > FEW:
                out[mine] = attend(q[mine], keys, values, ancestors(parents)[asking])
            elif len(asking):
                out[mine] = attend_few(q[mine], keys, values, parents, asking)
        return w.out((out * sigmoid(gate)).reshape(len(q), H * hd), self.workers)

    # ------------------------------------------------------------------ gated delta net
    def delta_net(self, x, w, step, layer):
        c, T = self.config, len(x)
        Nv, dv, C = c.linear_num_value_heads, c.linear_value_head_dim, c.conv_channels
        into = w.into(x, self.workers)                          # [mix | z | b | a]
        mix, z, b, a = into[:, :C], into[:, C:-2 * Nv], into[:, -2 * Nv:-Nv], into[:, -Nv:]
        beta, g = sigmoid(b), w.decay * softplus(a + w.dt_bias)
        out = np.empty((T, Nv, dv), np.float32)
        for r in range(step.sequences):
            rows, slot = step.span(r), int(step.slots[r])
            out[rows] = self.mix_sequence(mix[rows], g[rows], beta[rows], w, step, r, layer, slot)
        out = rms_unit(out, c.rms_norm_eps) * w.norm * silu(z.reshape(T, Nv, dv))
        return w.out(out.reshape(T, Nv * dv), self.workers)

    def mix_sequence(self, mix, g, beta, w, step, r, layer, slot):
        """Convolution and delta rule of one sequence; commits its rows or keeps them for replay. Returns o [t, Nv, dv]."""
        S, window = self.S[layer, slot], self.window[layer, slot]
        if step.commit[r]:
            q, k, v = self.split_heads(silu(causal_conv(window, mix, w.conv)))
            window[:] = np.concatenate([window, mix])[-len(window):]
            if len(mix) == 1:
                return delta_step(q[0], k[0], v[0], g[0], beta[0], S)[None]
            return delta_chunked(q, k, v, g, beta, S)
        parents = step.parents[step.span(r)]
        q, k, v = self.split_heads(silu(causal_conv(window, mix, w.conv, parents)))
        self.replay.setdefault(slot, []).append((mix, k, v, g, beta))
        if self.stepwise:
            return tree_stepwise(q, k, v, g, beta, S, parents)
        return delta_tree(q, k, v, g, beta, S, ancestors(parents))

    def split_heads(self, y):
        """[t, C] -> unit q (scaled by dk^-0.5) and k [t, Nv, dk], v [t, Nv, dv]; a key head serves Nv/Nk value heads."""
        c, T = self.config, len(y)
        Nk, Nv, dk = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim
        qk = l2_unit(y[:, :2 * Nk * dk].reshape(T, 2 * Nk, dk))
        qk = np.repeat(qk, Nv // Nk, axis=1)
        return qk[:, :Nv] * np.float32(dk ** -0.5), qk[:, Nv:], y[:, 2 * Nk * dk:].reshape(T, Nv, -1)

    # ------------------------------------------------------------------ accepting a tree
    def commit(self, slot: int, pages: np.ndarray, length: int, accepted: np.ndarray) -> None:
        """Make accepted rows of a slot's open tree part of its past: close the gaps in its KV, replay them into S, window.
        Every step does it first; this alone settles a sequence that has no further step."""
        saved = self.replay.pop(slot, None)
        if not len(accepted):
            return
        assert saved is not None, "accepted rows need an uncommitted step before"
        for layer in range(len(self.config.full_layers)):
            keys, values = read_rows(self.kv[:, layer], pages, length + int(accepted.max()) + 1)
            picked = length + accepted
            write_rows(self.kv[:, layer], pages, length, keys[picked], values[picked])
        mix, k, v, g, beta = (np.stack([x[accepted] for x in layers]) for layers in zip(*saved))
        window = self.window[:, slot]
        window[:] = np.concatenate([window, mix], 1)[:, -window.shape[1]:]
        (replay_stepwise if self.stepwise else delta_replay)(k, v, g, beta, self.S[:, slot])
