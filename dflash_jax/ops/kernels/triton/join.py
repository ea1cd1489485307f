"""Joins launches of Triton kernels that follow one another in a program into one call (`call.launch_p`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from dflash_jax.ops.kernels.triton.call import Kernel, launch_p, shape_of

# Functions within a program that are called once, whose launches belong to their caller.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat")
# What writes one of its arguments in place where nothing else reads it, as loops may do: it stays after what reads it.
IN_PLACE = ("dynamic_update_slice", "scatter", "while", "scan", "cond")
VIEWS = ("reshape", "squeeze", "expand_dims")


def join(jaxpr: Any) -> Any:
    """A program in which launches that follow one another are one call of `launch_p`, also in its loops.

    Of the operations between two launches, those that do not depend on the first are computed before it, and those that
    the second does not need after both. Views of a result (`VIEWS`) are the same buffer.

    Args:
        jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.

    Returns:
        One of the same type.
    """
    # Since jax 0.11 both are one type.
    if not isinstance(jaxpr, jex.Jaxpr):
        return jaxpr.replace(jaxpr=join(jaxpr.jaxpr))
    eqns, outvars = _inlined(jaxpr)
    joiner = _Joiner(eqns, outvars)
    for i, eqn in enumerate(eqns):
        joiner.add(i, eqn)
    joiner.flush()
    return jaxpr.replace(eqns=joiner.eqns, outvars=outvars)


class _Group:
    """Launches that become one call, and what is computed after it.

    Attributes:
        kernels: The kernels; a buffer is an operand's number, or -1 less a result's.
        operands: Arguments of the call.
        results: Variables of its results. A result that a later kernel overwrites has that kernel's.
        aliases: Results that are operands, overwritten.
        buffers: The buffer of each variable, views among them.
        overwritten: Variables whose buffer a kernel has overwritten.
        after: What is computed after the call.
        after_vars: Its variables that are no buffers of the group.
        first: The first launch.
    """

    def __init__(self, first: jex.JaxprEqn | None = None):
        self.kernels: list[Kernel] = []
        self.operands: list[Any] = []
        self.results: list[jex.Var] = []
        self.aliases: dict[int, int] = {}
        self.buffers: dict[jex.Var, int] = {}
        self.overwritten: set[jex.Var] = set()
        self.after: list[jex.JaxprEqn] = []
        self.after_vars: set[jex.Var] = set()
        self.first = first

    def names(self, buffer: int) -> set[jex.Var]:
        """The variables of a buffer."""
        return {v for v, b in self.buffers.items() if b == buffer}

    def is_result(self, variable: jex.Var) -> bool:
        """Whether the call computes a variable, or that of which it is a view."""
        buffer = self.buffers.get(variable)
        return buffer is not None and (buffer < 0 or buffer in self.aliases) and variable not in self.operands

    def operand(self, atom: Any) -> int:
        """The buffer of an argument of a launch."""
        if isinstance(atom, jex.Var) and atom in self.buffers:
            return self.buffers[atom]
        self.operands.append(atom)
        if isinstance(atom, jex.Var):
            self.buffers[atom] = len(self.operands) - 1
        return len(self.operands) - 1

    def add(self, eqn: jex.JaxprEqn) -> None:
        """Adds a launch."""
        numbers = [self.operand(atom) for atom in eqn.invars]
        written = {result: numbers[operand] for operand, result in eqn.params["aliases"]}
        for j, variable in enumerate(eqn.outvars):
            buffer = written.get(j)
            if buffer is None:
                buffer = -1 - len(self.results)
                self.results.append(variable)
            else:
                self.overwritten |= self.names(buffer)
                if buffer >= 0 and buffer not in self.aliases:
                    self.aliases[buffer] = len(self.results)
                    self.results.append(variable)
                else:
                    self.results[self.aliases[buffer] if buffer >= 0 else -1 - buffer] = variable
            self.buffers[variable] = buffer
            numbers.append(buffer)
        (kernel,) = eqn.params["kernels"]
        self.kernels.append(replace(kernel, buffers=tuple(numbers[b] for b in kernel.buffers)))

    def eqns(self) -> list[jex.JaxprEqn]:
        """The call, and what is computed after it."""
        if self.first is None:
            return []
        count = len(self.operands)
        params = {
            "kernels": tuple(
                replace(k, buffers=tuple(b if b >= 0 else count - 1 - b for b in k.buffers)) for k in self.kernels
            ),
            "results": tuple(shape_of(v.aval) for v in self.results),
            "aliases": tuple(sorted(self.aliases.items())),
        }
        # Nothing needs a view of what was overwritten.
        after = [eqn for eqn in self.after if not (_is_view(eqn) and eqn.invars[0] in self.overwritten)]
        return [self.first.replace(invars=self.operands, outvars=self.results, params=params), *after]


class _Joiner:
    """Joins the launches among a program's equations, which are added in order.

    Attributes:
        eqns: The new equations, without those of the open group.
    """

    def __init__(self, eqns: Sequence[jex.JaxprEqn], outvars: Sequence[Any]):
        self.eqns: list[jex.JaxprEqn] = []
        self._group = _Group()
        # By variable, the last equation that reads it.
        self._last_use = {v: i for i, eqn in enumerate(eqns) for v in _reads(eqn)}
        self._last_use |= dict.fromkeys((v for v in outvars if isinstance(v, jex.Var)), len(eqns))

    def flush(self) -> None:
        """Ends the open group."""
        self.eqns += self._group.eqns()
        self._group = _Group()

    def add(self, i: int, eqn: jex.JaxprEqn) -> None:
        """Adds equation ``i``."""
        if eqn.primitive is launch_p:
            if self._must_come_after(i, eqn):
                self.flush()
            if self._group.first is None:
                self._group = _Group(eqn)
            self._group.add(eqn)
            return
        group, eqn = self._group, eqn.replace(params={k: _joined(value) for k, value in eqn.params.items()})
        if group.first is None or eqn.effects:
            self.flush()
            self.eqns.append(eqn)
        elif any(v in group.after_vars or group.is_result(v) for v in _reads(eqn)) or not _is_movable(eqn):
            group.after.append(eqn)
            if _is_view(eqn) and eqn.invars[0] in group.buffers:
                group.buffers[eqn.outvars[0]] = group.buffers[eqn.invars[0]]
            else:
                group.after_vars.update(eqn.outvars)
        else:
            self.eqns.append(eqn)

    def _must_come_after(self, i: int, eqn: jex.JaxprEqn) -> bool:
        """Whether a launch cannot be in the open group."""
        group = self._group
        if any(v in group.after_vars or v in group.overwritten for v in _reads(eqn)):
            return True
        for operand, _ in eqn.params["aliases"]:
            variable = eqn.invars[operand]
            if not isinstance(variable, jex.Var):
                continue
            buffer = group.buffers.get(variable)
            if buffer is not None:
                # A result that is an operand has its shape, and no other argument is what the launch overwrites.
                if buffer in group.aliases and shape_of(variable.aval) != shape_of(group.operands[buffer].aval):
                    return True
                if [group.buffers.get(v) for v in _reads(eqn)].count(buffer) > 1:
                    return True
            names = {variable} if buffer is None else group.names(buffer) - group.overwritten
            # What comes after the group reads what the launch would overwrite.
            if any(not _is_view(later) and names.intersection(_reads(later)) for later in group.after):
                return True
            if any(group.is_result(name) and self._last_use.get(name, i) > i for name in names):
                return True
        return False


def _is_view(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in VIEWS


def _is_movable(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation may be computed before launches that it does not depend on."""
    if eqn.primitive.name.startswith(IN_PLACE):
        return False
    return all(all(map(_is_movable, inner.eqns)) for inner in jex.jaxprs_in_params(eqn.params))


def _reads(eqn: jex.JaxprEqn) -> list[jex.Var]:
    return [v for v in eqn.invars if isinstance(v, jex.Var)]


def _joined(value: Any) -> Any:
    """A parameter of an equation, with the programs in it joined."""
    # Not a named tuple.
    if type(value) is tuple:
        return tuple(map(_joined, value))
    return join(value) if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr) and _launches(value) else value


def _launches(jaxpr: Any) -> bool:
    """Whether a program launches kernels."""
    return any(eqn.primitive is launch_p or any(map(_launches, jex.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _inlined(jaxpr: jex.Jaxpr) -> tuple[list[jex.JaxprEqn], list[Any]]:
    """The equations and results of a program, with those of the functions that it calls and that launch kernels."""
    eqns: list[jex.JaxprEqn] = []
    new = jex.gensym()

    def walk(jaxpr: jex.Jaxpr, values: dict[jex.Var, Any], is_called: bool) -> list[Any]:
        def value(atom: Any) -> Any:
            return values.get(atom, atom) if isinstance(atom, jex.Var) else atom

        for eqn in jaxpr.eqns:
            inputs, inner = [value(atom) for atom in eqn.invars], _called(eqn)
            if inner is not None:
                results = walk(inner, dict(zip(inner.invars, inputs, strict=True)), True)
                values.update(zip(eqn.outvars, results, strict=True))
                continue
            # A function may be called twice: each call has variables of its own.
            outputs = [new(v.aval) if is_called else v for v in eqn.outvars]
            values.update(zip(eqn.outvars, outputs, strict=True))
            eqns.append(eqn.replace(invars=inputs, outvars=outputs))
        return [value(atom) for atom in jaxpr.outvars]

    return eqns, walk(jaxpr, {}, False)


def _called(eqn: jex.JaxprEqn) -> jex.Jaxpr | None:
    """The program of a function that an equation calls and that launches kernels."""
    if eqn.primitive.name not in CALLS:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None or getattr(inner, "consts", ()) or not _launches(inner):
        return None
    return inner if isinstance(inner, jex.Jaxpr) else inner.jaxpr
