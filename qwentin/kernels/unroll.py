"""Unroll and fold a kernel at its syntax tree, before numba sees it.

numba neither unrolls a loop that indexes a tuple of registers by its variable nor drops a branch on a number that is
known. So `unroll` rewrites the function first:

    for i in static_range(4): acc = mma(a[i], b, acc)        four statements, i = 0, 1, 2, 3
    a = tuple(load_x4(p + i * 32) for i in static_range(4))  a tuple of four calls
    if SPLIT > 1: ...                                        kept or dropped when SPLIT is a number the builder chose
    x & mask(i)                                              the number, if mask is a compile_time function
    p + 16 * lane, x * 0.5                                   p + u32(16) * lane, x * f32(0.5)

The names folded are numbers and strings in the function's closure or module. The last line is a rule for every number in
arithmetic: integers are unsigned, floats are float32. numba would make them int64 and float64, and u64 + int64 is
float64 to it. Products and sums of u32 are u64 to numba, so addresses cannot overflow; write
`u32(...)` where a 32-bit wrap is meant. Subscripts, shapes and call arguments are left alone.

Line numbers are kept: a traceback, a typing error and the `.loc` of the PTX name the line that was written.
The rewritten text is `source_of(function)`, and stands in linecache under `<unrolled NAME>` for debuggers.
"""
import ast
import copy
import functools
import inspect
import linecache
import threading
import types as python_types

from numba.cuda import types as numba_types

u32, u64, f32 = numba_types.uint32, numba_types.uint64, numba_types.float32
CASTS = {"u32": u32, "u64": u64, "f32": f32}          # names the rewritten text may use
CONSTANT = (bool, int, float, str, type(None))        # kinds of closure and module values that are folded
NUMERIC_CALLS = {"range", "min", "max"}               # builtins whose plain numbers are arithmetic, not options
ONE_TREE = threading.Lock()                           # CPython 3.11 counts the depth of trees in one place for all threads


class UnrollError(TypeError):
    """A kernel asks for something that cannot be known when it is compiled; names the file and line."""


def compile_time(function):
    """Decorator: a plain function of numbers that unroll calls, so that its result stands in the kernel's text."""
    function.compile_time = True
    return function


def static_range(*bounds):
    """A loop written out at compile time; means something only inside a function given to `unroll`."""
    raise UnrollError("static_range is rewritten by unroll and never runs; decorate the kernel with @kernel or @device")


class Fold(ast.NodeTransformer):
    """Replace known names by their values, write out static loops, drop dead branches.

    `known`: name -> number, string or compile_time function.
    """

    def __init__(self, known, where):
        self.known, self.where = known, where

    def value(self, node):
        """The value of an expression of constants; raises ValueError for any other."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple(self.value(e) for e in node.elts)
        operators = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp)
        if not isinstance(node, operators) or not all(
                isinstance(n, (*operators, ast.Constant, ast.operator, ast.unaryop, ast.cmpop, ast.boolop))
                for n in ast.walk(node)):
            raise ValueError("not a constant expression")
        return eval(compile(ast.fix_missing_locations(ast.Expression(node)), self.where, "eval"), {"__builtins__": {}})

    def folded(self, node):
        node = self.generic_visit(node)
        try:
            return ast.copy_location(ast.Constant(self.value(node)), node)
        except (ValueError, TypeError, ZeroDivisionError, OverflowError):
            return node

    visit_UnaryOp = visit_Compare = folded

    def visit_BinOp(self, node):
        """Arithmetic of constants; `x + 0` and `x * 1` become x, `(a, b) * 3` the six elements."""
        node = self.folded(node)
        for kind, neutral in ((ast.Add, 0), (ast.Mult, 1)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, kind):
                for side, other in ((node.left, node.right), (node.right, node.left)):
                    if isinstance(side, ast.Constant) and type(side.value) is int and side.value == neutral:
                        return other
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.Tuple) \
                and isinstance(node.right, ast.Constant):
            return display([copy.deepcopy(e) for _ in range(node.right.value) for e in node.left.elts], node)
        return node

    def visit_BoolOp(self, node):
        """A known term decides (`and` with a false one, `or` with a true one) or disappears; terms are conditions."""
        decides = isinstance(node.op, ast.Or)
        terms = [self.visit(v) for v in node.values]
        unknown = [t for t in terms if not isinstance(t, ast.Constant)]
        if any(isinstance(t, ast.Constant) and bool(t.value) == decides for t in terms):
            return ast.copy_location(ast.Constant(decides), node)
        if not unknown:
            return ast.copy_location(ast.Constant(not decides), node)
        return unknown[0] if len(unknown) == 1 else ast.copy_location(ast.BoolOp(node.op, unknown), node)

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load) and not callable(self.known.get(node.id, callable)):
            return ast.copy_location(ast.Constant(self.known[node.id]), node)
        return node

    def visit_IfExp(self, node):
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            return self.visit(node.body if node.test.value else node.orelse)
        return self.generic_visit(node)

    def visit_If(self, node):
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            return self.statements(node.body if node.test.value else node.orelse)
        node.body = self.statements(node.body) or [ast.copy_location(ast.Pass(), node)]
        node.orelse = self.statements(node.orelse)
        return node

    def visit_While(self, node):
        node = self.generic_visit(node)
        node.body = node.body or [ast.copy_location(ast.Pass(), node)]
        return node

    def visit_For(self, node):
        if not is_static(node.iter):
            return counted(self.visit_While(node))
        if node.orelse or any(own_jumps(node.body)):
            raise UnrollError(f"{self.where}:{node.lineno}: a static_range loop takes no else, break or continue")
        return [s for inner in self.turns(node.target, node.iter) for s in inner.statements(copy.deepcopy(node.body))]

    def visit_Call(self, node):
        """`tuple(expression for i in static_range(n))` is a tuple display; a compile_time function is called."""
        if isinstance(node.func, ast.Name) and callable(self.known.get(node.func.id)):
            return self.called(self.known[node.func.id], self.generic_visit(node))
        inside = node.args[0] if len(node.args) == 1 else None
        if not (isinstance(node.func, ast.Name) and node.func.id == "tuple" and isinstance(inside, ast.GeneratorExp)):
            return self.generic_visit(node)
        loops = inside.generators
        if len(loops) != 1 or loops[0].ifs or not is_static(loops[0].iter):
            raise UnrollError(f"{self.where}:{node.lineno}: tuple(...) takes one plain static_range loop")
        return display([inner.visit(copy.deepcopy(inside.elt))
                        for inner in self.turns(loops[0].target, loops[0].iter)], node)

    def called(self, function, node):
        try:
            return ast.copy_location(ast.Constant(function(*map(self.value, node.args))), node)
        except ValueError:
            raise UnrollError(f"{self.where}:{node.lineno}: {ast.unparse(node)} is not known when the kernel is compiled"
                              ) from None

    def turns(self, target, call):
        """One Fold for each turn of a static loop, its variable known."""
        try:
            bounds = [self.value(self.visit(a)) for a in call.args]
        except ValueError:
            raise UnrollError(f"{self.where}:{call.lineno}: static_range({', '.join(map(ast.unparse, call.args))}) "
                              "is not known when the kernel is compiled") from None
        return [Fold({**self.known, target.id: value}, self.where) for value in range(*bounds)]

    def statements(self, body):
        """A list of statements, each folded into none, one or several."""
        out = []
        for statement in body:
            made = self.visit(statement)
            out += made if isinstance(made, list) else [] if made is None else [made]
        return out


class Narrow(ast.NodeTransformer):
    """Give every number in arithmetic its type: u32 (u64 past 32 bits) for integers, f32 for floats."""

    def number(self, node):
        """A constant as a cast of itself; tuples element by element; anything else visited."""
        if isinstance(node, ast.Tuple):
            node.elts = [self.number(e) for e in node.elts]
            return node
        if not isinstance(node, ast.Constant):
            return self.visit(node)
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)) or \
                isinstance(node.value, int) and node.value < 0:
            return node
        name = "f32" if isinstance(node.value, float) else "u32" if node.value < 2**32 else "u64"
        cast = ast.Call(ast.Name(name, ast.Load()), [node], [])
        return ast.fix_missing_locations(ast.copy_location(cast, node))

    def visit_BinOp(self, node):
        node.left, node.right = self.number(node.left), self.number(node.right)
        return node

    def visit_UnaryOp(self, node):
        node.operand = self.number(node.operand)
        return node

    def visit_Compare(self, node):
        node.left, node.comparators = self.number(node.left), [self.number(c) for c in node.comparators]
        return node

    def visit_IfExp(self, node):
        node.test, node.body, node.orelse = self.visit(node.test), self.number(node.body), self.number(node.orelse)
        return node

    def visit_value(self, node):
        """Assignments and returns."""
        if node.value is not None:
            node.value = self.number(node.value)
        return node

    visit_Assign = visit_AugAssign = visit_AnnAssign = visit_Return = visit_value

    def visit_Subscript(self, node):
        """A plain index must stay plain (numba reads tuples by it); arithmetic in one is arithmetic."""
        node.value, node.slice = self.visit(node.value), self.visit(node.slice)
        return node

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id in CASTS:
            node.args = [a if isinstance(a, ast.Constant) else self.visit(a) for a in node.args]
        elif isinstance(node.func, ast.Name) and node.func.id in NUMERIC_CALLS:
            node.args = [self.number(a) for a in node.args]
        else:
            node.args = [self.number(a) if isinstance(getattr(a, "value", None), float) else self.visit(a)
                         for a in node.args]
        return node


def display(elements, node):
    """A tuple display at a node's place. Past 30 elements Python would build a list, which numba mishandles: a sum."""
    parts = [ast.Tuple(elements[i:i + 30], ast.Load()) for i in range(0, max(len(elements), 1), 30)]
    whole = functools.reduce(lambda left, right: ast.BinOp(left, ast.Add(), right), parts)
    for part in (whole, *parts):
        ast.copy_location(part, node)
    return ast.fix_missing_locations(ast.copy_location(whole, node))


def is_static(node):
    """Whether an expression is a call of static_range."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "static_range"


def counted(loop):
    """`for k in range(...)` as a while loop on a u32: numba's range counts with signed 64-bit bookkeeping.

    Loops that `continue`, assign their variable, have an else or a step that is not a positive number stay as they are.
    """
    call = loop.iter
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
        return loop
    start, stop, step = {1: [0, *call.args, 1], 2: [*call.args, 1], 3: call.args}[len(call.args)]
    start, step = (ast.Constant(x) if isinstance(x, int) else x for x in (start, step))
    name = loop.target.id
    names = [n for statement in loop.body for n in ast.walk(statement) if isinstance(n, ast.Name)]
    assigned = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    if loop.orelse or name in assigned or any(isinstance(n, ast.Continue) for n in own_jumps(loop.body)) \
            or not (isinstance(step, ast.Constant) and step.value > 0):
        return loop
    head = ast.parse(f"{name} = u32(x)\n{name}_end = x\n"
                     f"while {name} < {name}_end:\n    {name} = u32({name} + x)").body
    for node in (n for statement in head for n in ast.walk(statement)):
        ast.copy_location(node, loop)
    head[0].value.args[0], head[1].value, head[2].body[0].value.args[0].right = start, stop, step
    head[2].body = loop.body + head[2].body
    return head


def own_jumps(body):
    """The break and continue statements of a loop's body that are not those of a loop inside it."""
    for node in body:
        if isinstance(node, (ast.Break, ast.Continue)):
            yield node
        elif not isinstance(node, (ast.For, ast.While)):
            yield from own_jumps(ast.iter_child_nodes(node))


def surroundings(function):
    """name -> value of what a function sees: its module's names, then its closure."""
    seen = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        seen[name] = cell.cell_contents
    return seen


def tree_of(function):
    """The function's syntax tree, without decorators and annotations, positions as in its file."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise UnrollError(f"{function.__name__} has no source file to read; write it in a module") from None
    indented = lines[0][:1].isspace()
    tree = ast.parse(("if 1:\n" if indented else "") + "".join(lines))
    ast.increment_lineno(tree, first - 1 - indented)
    definition = tree.body[0].body[0] if indented else tree.body[0]
    definition.decorator_list, definition.returns = [], None
    for argument in definition.args.args:
        argument.annotation = None
    return definition


def unroll(function):
    """The function with static loops written out and compile-time branches gone; see the module's docstring.

    It carries `unrolled_source`, its text, and `mentions`, the names and (module, attribute) pairs that it reads.
    """
    with ONE_TREE:
        return unrolled(function)


def unrolled(function):
    where, seen = function.__code__.co_filename, surroundings(function)
    definition = tree_of(function)
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    known = {n: v for n, v in seen.items() if n not in local
             and (type(v) in CONSTANT or inspect.isfunction(v) and hasattr(v, "compile_time"))}
    definition.body = Fold(known, where).statements(definition.body)
    definition = Narrow().generic_visit(definition)
    module = ast.fix_missing_locations(ast.Module([definition], []))
    source, name = ast.unparse(module), f"<unrolled {function.__module__}.{function.__qualname__}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    code = next(c for c in compile(module, where, "exec").co_consts if isinstance(c, python_types.CodeType))
    made = python_types.FunctionType(code, {**seen, **CASTS}, function.__name__)
    made.__module__, made.__doc__, made.__qualname__ = function.__module__, function.__doc__, function.__qualname__
    made.unrolled_source, made.mentions = source, tuple(mentions(definition))
    return made


def mentions(tree):
    """The names in a tree and its dotted names `a.b` as pairs, each as often as it stands there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def source_of(function):
    """The rewritten text of a function that `unroll` made."""
    return function.unrolled_source
