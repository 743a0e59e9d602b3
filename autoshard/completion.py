"""Completion scripts for shells, made from the argument parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}  # llama:8b is one word
_autoshard() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" = 1 ]; then words={commands}; fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _autoshard autoshard"""

_CASE = """\
    {name})
        words={options}
        if [ "$COMP_CWORD" = 2 ]; then words="$words "{first}; fi
        case "$before" in
{values}
        esac ;;"""


Words = Mapping[str, Iterable[str]]
"""values of arguments that are more than their choices, by destination"""


def completion_script(parser: argparse.ArgumentParser, shell: str, words: Words) -> str:
    """The script for a shell of :data:`SHELLS`."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert isinstance(commands, dict)
    if shell == "fish":
        return "\n".join(_fish_lines(commands, words))
    cases = "\n".join(_bash_case(name, command, words) for name, command in commands.items())
    return _BASH.format(commands=quote(" ".join([*commands, *_options(parser)])), cases=cases)


def _options(command: argparse.ArgumentParser) -> list[str]:
    """The options that start with two dashes."""
    return [name for action in command._actions for name in action.option_strings if name.startswith("--")]


def _values(action: argparse.Action, words: Words) -> str:
    """Possible values of an argument, quoted; none if they are free."""
    return quote(" ".join(words.get(action.dest) or map(str, action.choices or ())))


def _bash_case(name: str, command: argparse.ArgumentParser, words: Words) -> str:
    options, first = " ".join(_options(command)), "''"
    after: dict[str, list[str]] = {}
    for action in reversed(command._actions):
        if not action.option_strings:
            first = _values(action, words)
        elif action.nargs != 0:
            after.setdefault(_values(action, words), []).extend(action.option_strings)
    values = "\n".join(f"        {'|'.join(names)}) words={found} ;;" for found, names in after.items())
    return _CASE.format(name=name, first=first, options=quote(options), values=values)


def _fish_lines(commands: dict[str, argparse.ArgumentParser], words: Words) -> Iterator[str]:
    # files are offered only where an option takes a path
    yield "complete -c autoshard -f"
    for name, command in commands.items():
        said = quote(command.description or "")
        yield f"complete -c autoshard -n __fish_use_subcommand -a {name} -d {said}"
        within = f"complete -c autoshard -n '__fish_seen_subcommand_from {name}'"
        for action in command._actions:
            if not action.option_strings:
                yield f"{within} -a {_values(action, words)}"
                continue
            takes = " -r -F" if action.metavar in ("FILE", "PATH") else f" -x -a {_values(action, words)}"
            long = action.option_strings[-1].removeprefix("--")
            yield f"{within} -l {long}{takes if action.nargs != 0 else ''} -d {quote((action.help or '').partition(' (')[0])}"
