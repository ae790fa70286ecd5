"""A flat list of instructions -> basic blocks, numbered so that diverged threads meet again.

Threads run at the lowest-numbered block any of them has reached. Two properties of the numbering make that the
reconvergence a warp needs: a block comes after both sides of every branch that leads to it (topological order), and
a whole loop comes before what follows it (every strongly connected component is contiguous, its head first).
"""
import heapq
from dataclasses import dataclass, field

from .errors import Unsupported
from .operands import Imm, Instruction

JUMP, BRANCH, BARRIER, EXIT = "jump", "branch", "barrier", "exit"


@dataclass
class Block:
    """kind BRANCH goes to `taken` where the guard of `last` holds, else to `next`; JUMP and BARRIER go to `next`."""
    code: list = field(default_factory=list)
    kind: str = JUMP
    next: int = None
    taken: int = None
    last: Instruction = None

    def successors(self):
        return [b for b in (self.next, self.taken) if b is not None]


def is_barrier(ins):
    return ins.base in ("bar", "barrier") and "warp" not in ins.mods


def build(flat):
    """Basic blocks of a flat list of Instructions and ("label", key) pairs; block 0 is the entry."""
    blocks, labels, branches = [Block()], {}, []
    exits = len([i for i in flat if not isinstance(i, tuple)]) + len(flat) + 1        # stands for "the exit block"

    def open_block():
        blocks[-1].next = len(blocks)
        blocks.append(Block())

    for item in flat:
        if isinstance(item, tuple):
            if blocks[-1].code or blocks[-1].last:
                open_block()
            labels[item[1]] = len(blocks) - 1
            continue
        if is_barrier(item) and item.guard:                              # @p bar: a branch around it
            skip = Instruction(("bra",), [], item.text, item.place, item.guard, not item.negated)
            blocks[-1].kind, blocks[-1].last, blocks[-1].taken = BRANCH, skip, len(blocks) + 1
            open_block()
        if item.base in ("bra", "ret", "exit") or is_barrier(item):
            end_block(blocks, item, exits, branches)
            open_block()
        elif item.base == "brx":
            raise Unsupported(f"`{item.text}`")
        else:
            blocks[-1].code.append(item)
    blocks[-1].next = len(blocks)
    blocks.append(Block(kind=EXIT))                                      # falling off the end returns
    for block, target in branches:
        aim = resolve(labels, target)
        if block.kind == BRANCH:
            block.taken = aim
        else:
            block.next = aim
    for block in blocks:
        block.next = len(blocks) - 1 if block.next == exits else block.next
        block.taken = len(blocks) - 1 if block.taken == exits else block.taken
    return renumbered(blocks)


def end_block(blocks, item, exits, branches):
    """Close the last block with a jump, a barrier or a return."""
    block = blocks[-1]
    block.last = item
    if is_barrier(item):
        block.kind = BARRIER
    elif item.base == "bra":
        block.kind = BRANCH if item.guard else JUMP
        branches.append((block, item.args[0]))
    elif item.guard:
        block.kind, block.taken = BRANCH, exits
    else:
        block.kind = EXIT


def resolve(labels, target):
    if target.name in labels:                                            # the end of an inlined call
        return labels[target.name]
    for scope in reversed(target.scopes):
        if (scope, target.name) in labels:
            return labels[scope, target.name]
    raise Unsupported(f"jump to unknown label {target.name}")


def renumbered(blocks):
    """The reachable blocks in execution order (see the module's docstring)."""
    for block in blocks:
        if block.kind == EXIT:
            block.next = block.taken = None
    reachable, todo = {0}, [0]
    while todo:
        for b in blocks[todo.pop()].successors():
            if b not in reachable:
                reachable.add(b)
                todo.append(b)
    order = arranged(blocks, reachable, 0)
    number = {b: i for i, b in enumerate(order)}
    for b in order:
        blocks[b].next, blocks[b].taken = number.get(blocks[b].next), number.get(blocks[b].taken)
    return [blocks[b] for b in order]


def arranged(blocks, nodes, entry):
    """Topological order of the components of `nodes`; inside a loop: its head, then the rest.

    Of what could come next, a block that ends the kernel (nobody must wait for threads that are about to leave), then
    the earliest in the text."""
    component = components(blocks, nodes)
    members, waits = {}, {}
    for node in sorted(nodes):
        members.setdefault(component[node], []).append(node)
    edges = {(component[a], component[b]) for a in nodes for b in blocks[a].successors() if b in nodes}
    edges = {(a, b) for a, b in edges if a != b}
    for _, b in edges:
        waits[b] = waits.get(b, 0) + 1
    rank = {c: (blocks[min(m)].kind != EXIT, min(m)) for c, m in members.items()}
    ready = [(rank[c], c) for c in members if c not in waits]
    heapq.heapify(ready)
    order = []
    while ready:
        _, c = heapq.heappop(ready)
        inside = members[c]
        head = entry if entry in inside else entry_of(blocks, inside)
        order += [head] + (arranged(blocks, set(inside) - {head}, None) if len(inside) > 1 else [])
        for a, b in edges:
            if a == c:
                waits[b] -= 1
                if not waits[b]:
                    heapq.heappush(ready, (rank[b], b))
    return order


def entry_of(blocks, inside):
    """The block through which a loop is entered: the first that is reached from outside it."""
    aims = {b for a in set(range(len(blocks))) - set(inside) for b in blocks[a].successors()}
    return next((n for n in inside if n in aims), inside[0])


def components(blocks, nodes):
    """node -> number of its strongly connected component (Tarjan, without recursion)."""
    index, low, component, stack, on_stack = {}, {}, {}, [], set()
    for root in sorted(nodes):
        work = [(root, None)] if root not in index else []
        while work:
            node, successors = work.pop()
            if successors is None:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
                successors = iter([b for b in blocks[node].successors() if b in nodes])
            for b in successors:
                if b not in index:
                    work += [(node, successors), (b, None)]
                    break
                if b in on_stack:
                    low[node] = min(low[node], low[b], index[b])
            else:
                if low[node] == index[node]:
                    while stack[-1] != node:
                        on_stack.discard(stack[-1])
                        component[stack.pop()] = node
                    on_stack.discard(node)
                    component[stack.pop()] = node
                elif work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
    return component


def barrier_operands(ins):
    """(id, thread count or None) operands of a barrier instruction; a .red has its destination first."""
    args = ins.args[1:-1] if "red" in ins.mods else ins.args
    if not args:
        return Imm(0), None
    return args[0], args[1] if len(args) > 1 else None
