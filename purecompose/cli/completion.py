"""`completion`: a script, written by shtab, with which a shell completes the commands and the values of their options.

bash has the most features: lists of algorithms are completed after each comma, checkpoints by the names in the run's
folder, and values after `--model=` as after a space.
"""

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping

from purecompose._support.device import PRECISIONS
from purecompose.algorithms import FACTORIES
from purecompose.cli.settings import SETTINGS, UsageError
from purecompose.cli.setup import OPTIMIZERS, SCHEDULES
from purecompose.nn.models import MODELS


SHELLS = ("bash", "zsh", "fish", "tcsh")
_PROG = "purecompose"


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a shell.

    Args:
        parser: The parser of all commands; each of its arguments gets an attribute that defines its completion.
        shell: One of `SHELLS`.
    """
    try:
        import shtab  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("completion needs shtab; install it with `pip install 'purecompose[cli]'`") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(f"the installed shtab does not support {shell}; try `pip install --upgrade shtab`")
    for argument in _arguments(parser):
        how = _how(argument)
        if how is not None:
            argument.complete = how  # pyright: ignore[reportAttributeAccessIssue]
    parser.prog = _PROG
    begin, end = (_BASH_FUNCTIONS, f"\n{_BASH_END}") if shell == "bash" else ("", "")
    return shtab.complete(parser, shell=shell, root_prefix=_PROG, preamble=begin) + end


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a command and of its subcommands."""
    for action in parser._actions:  # argparse has no public access to them; shtab uses this attribute as well
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)


def _how(argument: argparse.Action) -> Mapping[str, str] | None:
    """Return the completion of an argument for each shell, as shtab expects it; None for no completion."""
    name = argument.option_strings[-1] if argument.option_strings else argument.metavar
    return _BY_NAME.get(str(name)) or _BY_METAVAR.get(str(argument.metavar))


def _one_of(words: Iterable[str], bash: str) -> dict[str, str]:
    """Return a completion by one of these words; `bash` is the name of a function."""
    together = " ".join(words)
    return {"bash": bash, "zsh": f"({together})", "fish": together, "tcsh": f"({together})"}


_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path)", "tcsh": "f"}
_FOLDERS = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/", "fish": "(__fish_complete_directories)", "tcsh": "d"}
_NAMES = " ".join(sorted(FACTORIES))
_KEYS = [f"{name}=" for name in SETTINGS]

_CHOICES: dict[str, Iterable[str]] = {
    "--model": MODELS,
    "--optimizer": sorted(OPTIMIZERS),
    "--schedule": sorted(SCHEDULES),
    "--precision": PRECISIONS,
    "--device": ("cpu", "cuda", "mps"),
    "--checkpoint": ("newest", "best"),
    "NAME": sorted(FACTORIES),
    "ALGORITHM": ("all", *sorted(FACTORIES)),
}
_BY_NAME = {
    **{name: _one_of(words, f"_{_PROG}_{name.strip('-')}") for name, words in _CHOICES.items()},
    # In zsh, an action that starts with a space is taken literally.
    "--algorithms": {
        "bash": f"_{_PROG}_algorithms",
        "zsh": f" _values -s , algorithm {_NAMES}",
        "fish": f"(__fish_complete_list , 'string split \\  \\'{_NAMES}\\'')",
        "tcsh": f"({_NAMES})",
    },
    "--data": {
        "bash": f"_{_PROG}_file_or_digits",  # because of `_file` in the name, shtab quotes the results as file names
        "zsh": "{compadd digits; _files}",
        "fish": "digits (__fish_complete_path)",
        "tcsh": "f",
    },
    "--set": {**_one_of(_KEYS, f"_{_PROG}_set"), "zsh": f" compadd -S '' -- {' '.join(_KEYS)}"},
}
_BY_METAVAR = {"FILE": _FILES, "PATH": _FILES, "FOLDER": _FOLDERS, "RUN": _FOLDERS}

# Each function is called with the typed part of the word, and prints the possible completions.
_BASH_FUNCTIONS = (
    f"""\
# A quote that is still open is not part of the value.
_{_PROG}_words() {{
  local typed="${{1#[\\"\\']}}"
  shift
  compgen -W "$*" -- "$typed"
}}

# The name after the last comma, unless that one is between a call's parentheses.
_{_PROG}_algorithms() {{
  local typed="${{1#[\\"\\']}}" opened closed last
  opened="${{typed//[^(]/}}" closed="${{typed//[^)]/}}" last="${{typed##*,}}"
  (( ${{#opened}} > ${{#closed}} )) && return
  last="${{last#"${{last%%[! ]*}}"}}"
  compgen -P "${{typed%"$last"}}" -W {shlex.quote(f"{_NAMES} none")} -- "$last"
}}

# The names in the folder of any run on the line as well.
_{_PROG}_checkpoint() {{
  local word path names="newest best"
  for word in "${{COMP_WORDS[@]}}"; do
    for path in "${{word/#\\~/$HOME}}"/checkpoints/*/index.json; do
      path="${{path%/index.json}}"
      [[ -d "$path" ]] && names+=" ${{path##*/}}"
    done
  done
  _{_PROG}_words "$1" "$names"
}}

_{_PROG}_file_or_digits() {{
  compgen -W digits -- "$1"
  compgen -f -- "$1"
}}

"""
    + "\n".join(
        f'_{_PROG}_{name.strip("-")}() {{ _{_PROG}_words "$1" {shlex.join(words)}; }}'
        for name, words in {**_CHOICES, "--set": _KEYS}.items()
        if name != "--checkpoint"
    )
    + "\n"
)

# Without -o default, arguments that have no completion of their own would not be completed as file names.
_BASH_END = f"""
_{_PROG}() {{
  local -a words=()
  local index word previous="" at="$COMP_CWORD"
  for index in "${{!COMP_WORDS[@]}}"; do
    word="${{COMP_WORDS[index]}}"
    if [[ "$word" == "=" && "$previous" == --* ]]; then  # bash cuts --model=cnn into three words
      word=""
      (( index < COMP_CWORD )) && {{ at=$((at - 1)); previous=""; continue; }}
    fi
    words+=("$word")
    previous="$word"
  done
  local -a COMP_WORDS=("${{words[@]}}")
  local COMP_CWORD="$at"
  _shtab_{_PROG} "$@"
  case "${{COMP_WORDS[COMP_CWORD - 1]}}" in
    --algorithms | --set) compopt -o nospace 2>/dev/null ;;  # more may follow
  esac
  return 0
}}

complete -o bashdefault -o default -F _{_PROG} {_PROG}"""
