"""The gated delta rule and its convolution in numpy: the mathematics of a linear-attention layer, one sequence at a time.

    S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q            (Yang et al., arXiv 2412.06464, eq. 10)

Two forms. `delta_step` is that line for one token. `delta_block` computes C rows at once from the WY representation and
takes an ancestor mask: a lower triangle makes it the chunked form of prefill, a tree's mask makes it tree verify.

Who calls: model/cpu.py alone. Proven by tests/test_cpu_delta.py (block = step = float64 loop, trees = their paths).
"""
import numpy as np

# Rows a block. At 64, the reference implementation's choice, products are large enough that OpenBLAS splits them over
# threads and too small to gain by it: 14 ms against 7 for 512 rows on two cores.
CHUNK = 32


def delta_step(q, k, v, g, beta, S):
    """One token. q, k [H, dk], v [H, dv], g, beta [H]; S [H, dk, dv] is updated in place. Returns o [H, dv]."""
    advance(k, v, g, beta, S)
    return (q[:, None, :] @ S)[:, 0]


def advance(k, v, g, beta, S):
    """delta_step without its output, for the states of several layers too: k [..., H, dk], S [..., H, dk, dv]."""
    S *= np.exp(g)[..., None, None]
    d = (v - (k[..., None, :] @ S)[..., 0, :]) * beta[..., None]
    S += k[..., None] * d[..., None, :]


def delta_block(q, k, v, g, beta, mask):
    """All that C rows need but the incoming state, for N independent blocks of one mask.

    q, k [N, H, C, dk], v [N, H, C, dv], g, beta [N, H, C]; mask bool [C, C], mask[i, j]: j is i or an ancestor of i.
    Returns (decay [N, H, C] = e^y, W [N, H, C, dk], U [N, H, C, dv], P [N, H, C, C]) such that for a state S

        delta = U - W S,      o = decay q S + P delta

    where y_i sums g over i and its ancestors, D_ij = e^(y_i - y_j) under the mask, A = beta K K^T D without its diagonal,
    (I + A) [U | W] = [beta V | beta e^y K] and P = Q K^T D.
    """
    y = g @ mask.T.astype(np.float32)                                           # [N, H, C]
    D = np.exp(np.where(mask, y[..., :, None] - y[..., None, :], -np.inf))      # difference first: never overflows
    kt = k.swapaxes(-1, -2)
    inverse = unit_lower_inverse(beta[..., None] * (k @ kt) * D)
    decay = np.exp(y)
    U = inverse @ (beta[..., None] * v)
    W = inverse @ ((beta * decay)[..., None] * k)
    return decay, W, U, (q @ kt) * D


def unit_lower_inverse(A):
    """(I + strict lower part of A)^-1, A f32 [..., C, C]; what stands on and above the diagonal is not read.

    Halves and joins, [[X, 0], [-Y B X, Y]] for the lower left block B, all halves of a level together; small or odd sizes by
    forward substitution. 12 times faster than LAPACK's general inverse at C = 64, and nothing is squared.
    """
    C, X = A.shape[-1], np.zeros_like(A)
    if C % 2 or C <= 8:
        X[..., np.arange(C), np.arange(C)] = 1
        for i in range(1, C):
            X[..., i:i + 1, :i] = -(A[..., i:i + 1, :i] @ X[..., :i, :i])
        return X
    h = C // 2
    upper, lower = unit_lower_inverse(np.stack([A[..., :h, :h], A[..., h:, h:]]))
    X[..., :h, :h], X[..., h:, h:] = upper, lower
    X[..., h:, :h] = -(lower @ A[..., h:, :h] @ upper)
    return X


def delta_chunked(q, k, v, g, beta, S):
    """T rows in order. q, k [T, H, dk], v [T, H, dv], g, beta [T, H]; S [H, dk, dv] updated in place. Returns o [T, H, dv].

    Whole blocks of CHUNK rows are prepared together, then S walks through them.
    """
    T, H, dv = v.shape
    out = np.empty((T, H, dv), np.float32)
    whole = T // CHUNK * CHUNK
    for start, stop, C in ((0, whole, CHUNK), (whole, T, T - whole)):
        if start == stop:
            continue
        cut = lambda x: np.ascontiguousarray(                                   # [T', H, *] -> [N, H, C, *]
            x[start:stop].reshape(((stop - start) // C, C) + x.shape[1:]).swapaxes(1, 2))
        Q, K, V, G, B = map(cut, (q, k, v, g, beta))
        decay, W, U, P = delta_block(Q, K, V, G, B, np.tril(np.ones((C, C), bool)))
        tail = np.exp(G.sum(-1, keepdims=True) - np.cumsum(G, -1))              # e^(y_C - y_i)
        K, Q = K * tail[..., None], Q * decay[..., None]    # not in place: K and Q may be the caller's arrays
        for n in range(len(Q)):
            delta = U[n] - W[n] @ S
            o = Q[n] @ S + P[n] @ delta
            out[start + n * C:start + (n + 1) * C] = o.swapaxes(0, 1)
            S *= decay[n, :, -1, None, None]
            S += K[n].swapaxes(-1, -2) @ delta
    return out


def delta_tree(q, k, v, g, beta, S, mask):
    """Rows of a draft tree: as delta_chunked with an ancestor mask, S only read. Returns o [T, H, dv]."""
    Q, K, V, G, B = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v, g, beta))
    decay, W, U, P = delta_block(Q, K, V, G, B, mask)
    o = (Q * decay[..., None]) @ S + P @ (U - W @ S)
    return np.ascontiguousarray(o.swapaxes(0, 1))


def delta_replay(k, v, g, beta, states):
    """Take a path's T rows into the states of N layers at once: delta_chunked without its outputs, in one block.

    k [N, T, H, dk], v [N, T, H, dv], g, beta [N, T, H]; states [N, H, dk, dv] updated in place.
    """
    K, V, G, B = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, g, beta))              # [N, H, T, *]
    y, T = np.cumsum(G, -1), k.shape[1]
    D = np.exp(np.where(np.tri(T, dtype=bool), y[..., :, None] - y[..., None, :], -np.inf))
    inverse = unit_lower_inverse(B[..., None] * (K @ K.swapaxes(-1, -2)) * D)
    U, W = inverse @ (B[..., None] * V), inverse @ ((B * np.exp(y))[..., None] * K)
    K *= np.exp(y[..., -1:] - y)[..., None]
    decay = np.exp(y[..., -1])[..., None, None]
    for n, S in enumerate(states):
        delta = U[n] - W[n] @ S
        S *= decay[n]
        S += K[n].swapaxes(-1, -2) @ delta


def tree_stepwise(q, k, v, g, beta, S, parents):
    """delta_tree, a row at a time from its parent's state: the bits that delta_step gives along each path."""
    out, states = np.empty_like(v), []
    for i, parent in enumerate(parents):
        states.append((states[parent] if parent >= 0 else S).copy())
        out[i] = delta_step(q[i], k[i], v[i], g[i], beta[i], states[-1])
    return out


def replay_stepwise(k, v, g, beta, states):
    """delta_replay, a token at a time."""
    for i in range(k.shape[1]):
        advance(k[:, i], v[:, i], g[:, i], beta[:, i], states)


def conv_taps(parents, taps):
    """Where each row's convolution inputs lie in [window | rows]: i32 [T, taps], the current row last.

    The window holds the taps-1 inputs before the step, oldest first, so step row i is entry taps-1+i.
    """
    back = taps - 1
    index = np.empty((len(parents), taps), np.int32)
    for i, parent in enumerate(parents):
        before = index[parent, 1:] if parent >= 0 else np.arange(back, dtype=np.int32)
        index[i, :-1], index[i, -1] = before, back + i
    return index


def causal_conv(window, mix, weight, parents=None):
    """Depthwise convolution before its silu. window [taps-1, C], mix [T, C], weight [taps, C] -> [T, C].

    parents None: the rows follow one another; otherwise each row follows its parent.
    """
    taps, T = weight.shape[0], len(mix)
    joined = np.concatenate([window, mix])
    at = [slice(j, j + T) for j in range(taps)] if parents is None else conv_taps(parents, taps).T
    out = joined[at[0]] * weight[0]
    for j in range(1, taps):
        out += joined[at[j]] * weight[j]
    return out
