"""`rankscope completion SHELL`: a script by which a shell completes the command's arguments.

The commands stand in the script; what they take is asked of their `--help` when it is needed, so
that a shell starts as fast as before and completes what the installed version takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_BASH = r"""
_rankscope() {
    local current=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} action= help words=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$current"))
        return
    fi
    case " @COMMANDS@ " in *" $command "*) ;; *) return ;; esac
    if [ "$COMP_CWORD" -gt 2 ]; then
        case ${COMP_WORDS[2]} in -*) ;; *[!a-z]*) ;; *) action=${COMP_WORDS[2]} ;; esac
    fi
    _rankscope_help() { help=$(COLUMNS=10000 rankscope "$@" --help 2>/dev/null </dev/null); }
    _rankscope_help "$command"
    local usage='s/^usage: .* \([a-z]*|[a-z|]*\) \.\.\.$/\1/p;2q'
    local actions=$(sed -n "$usage" <<<"$help" | tr '|' ' ')
    if [ -n "$actions" ]; then
        case " $actions " in *" $action "*) _rankscope_help "$command" "$action" ;; esac
        [ "$COMP_CWORD" -eq 2 ] && words=$actions
    fi
    case $current in
        -*) words=$(grep -oE -- '(^|[ ,[])--[a-z][a-z-]*' <<<"$help" | tr -d ' ,[' | sort -u) ;;
    esac
    [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _rankscope rankscope
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _BASH.lstrip()
_FISH = r"""
function __rankscope_help
    set -l words (commandline -opc)
    COLUMNS=10000 rankscope $words[2] --help 2>/dev/null </dev/null
end
complete -c rankscope -n __fish_use_subcommand -f -a "@COMMANDS@"
function __rankscope_options
    __rankscope_help | string match -ar -- '--[a-z][a-z-]*' | sort -u
end
complete -c rankscope -n "not __fish_use_subcommand" -a "(__rankscope_options)"
"""
_SCRIPTS = {"bash": _BASH.lstrip(), "zsh": _ZSH, "fish": _FISH.lstrip()}


def completion(argv: Sequence[str]) -> int:
    """Prints the script for a shell."""
    from rankscope.agent.cli import COMMANDS

    parser = argparse.ArgumentParser(
        prog="rankscope completion",
        description="Print a script by which a shell completes the arguments of rankscope.\n\n"
        '  bash:  eval "$(rankscope completion bash)"    in ~/.bashrc\n'
        '  zsh:   eval "$(rankscope completion zsh)"     in ~/.zshrc\n'
        "  fish:  rankscope completion fish | source     in ~/.config/fish/config.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    options = parser.parse_args(argv)
    names = " ".join(command.name for command in COMMANDS)
    sys.stdout.write(_SCRIPTS[options.shell].replace("@COMMANDS@", names))
    return 0
