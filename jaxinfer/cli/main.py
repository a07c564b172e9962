"""The `jaxinfer` command: one verb, few options. Each verb imports the heavy modules that it needs."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer import __version__
from jaxinfer.cli.batch import BATCH_EXAMPLES, add_batch_arguments
from jaxinfer.cli.bench import BENCH_EXAMPLES, add_benchmarks
from jaxinfer.cli.config_field_options import add_config_field_options, config_options
from jaxinfer.cli.plan import PLAN_EXAMPLES, add_plan_arguments
from jaxinfer.cli.serve import SERVE_EXAMPLES, add_serve_arguments, run_serve
from jaxinfer.cli.speculative_options import add_speculative_options, speculative_config
from jaxinfer.cli.structured_output_options import add_structured_output_options, structured_outputs

if TYPE_CHECKING:
    from jaxinfer import LLM, RequestOutput, SamplingParams

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DEFAULT_MAX_TOKENS = 256
SHOW_CACHE_HELP = "show on stderr how many prompt tokens were cached, and draw the prefix cache"

EXAMPLES = """\
examples:
  jaxinfer generate "Write a plan for cleaning a bicycle."
  jaxinfer serve path/to/checkpoint --port 8080
"""
GENERATE_EXAMPLES = """\
examples:
  jaxinfer generate "Write a plan for cleaning a bicycle."
  jaxinfer generate "First prompt" "Second prompt" --model path/to/checkpoint --temperature 0.7 --seed 1
  jaxinfer generate "Once upon a time" --raw --max-tokens 64
  jaxinfer generate "One question." "Another question." --show-cache
  jaxinfer generate "Write a guide with three points: build a drum." --speculative draft_model --show-drafts
  jaxinfer generate "Once upon a time" --raw --model path/to/diffusion-model --show-denoising
  jaxinfer generate "Describe a kettle." --json-schema kettle.json
  jaxinfer generate "Is a drum loud?" --choice yes no
"""
CHAT_EXAMPLES = """\
examples:
  jaxinfer chat
  jaxinfer chat --model path/to/checkpoint --system "Answer in one sentence." --temperature 0
  echo "Hello there" | jaxinfer chat

While chatting, /clear forgets the conversation and /exit (or end of file) leaves.
"""
CONVERT_EXAMPLES = """\
examples:
  jaxinfer convert path/to/hugging-face-directory path/to/converted
  jaxinfer convert Qwen/Qwen3-0.6B path/to/converted --dtype bfloat16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0, 1 after an error, reported on one line of stderr, or the verb's own.

    Raises:
        SystemExit: from argparse, with code 2 for wrong usage and 0 after --help.
    """
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe is gone; without this, the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, RuntimeError) as error:
        if args.verbose:
            traceback.print_exc()
        print(f"jaxinfer: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs. The namespace's `run` is the verb's function, which takes the namespace and may
    return an exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxinfer", description="Language model inference on JAX.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    verbose = argparse.ArgumentParser(add_help=False)
    verbose.add_argument("--verbose", action="store_true", help="show the traceback of an error")
    engine = _engine_options()
    sampling = _sampling_options()

    def add_verb(name: str, summary: str, examples: str, parents: list[argparse.ArgumentParser]) -> Any:
        return verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=examples,
            parents=parents,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    generate = add_verb("generate", "answer one or more prompts", GENERATE_EXAMPLES, [engine, sampling, verbose])
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="one prompt streams; several run as one batch")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    generate.add_argument("--show-cache", action="store_true", help=SHOW_CACHE_HELP)
    shown = generate.add_mutually_exclusive_group()
    shown.add_argument(
        "--show-drafts", action="store_true", help="show accepted drafts in colour (one prompt with --speculative)"
    )
    shown.add_argument(
        "--show-denoising", action="store_true", help="show blocks round by round (one prompt to a diffusion model)"
    )
    shown.add_argument(
        "--show-constraints", action="store_true",
        help="show in colour what a grammar has changed or forced (one prompt with a grammar)",
    )  # fmt: skip
    generate.add_argument(
        "--trace-schedule", action="store_true", help="print, on stderr, every launch of the scheduler and what landed"
    )
    add_structured_output_options(generate)
    generate.set_defaults(run=run_generate)

    chat = add_verb("chat", "talk with a model, line by line", CHAT_EXAMPLES, [engine, sampling, verbose])
    chat.add_argument("--system", metavar="TEXT", help="a system message that opens every conversation")
    chat.add_argument("--show-cache", action="store_true", help=SHOW_CACHE_HELP)
    chat.set_defaults(run=run_chat)

    convert = add_verb("convert", "convert a Hugging Face checkpoint for fast loading", CONVERT_EXAMPLES, [verbose])
    convert.add_argument("source", metavar="SRC", help="directory with safetensors and config.json, or a hub id")
    convert.add_argument("destination", metavar="DST", help="directory to create")
    convert.add_argument("--dtype", help="dtype of the stored weights, such as bfloat16 (default: the source's)")
    convert.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    add_config_field_options(convert)
    convert.set_defaults(run=run_convert)

    serve = add_verb("serve", "answer requests over HTTP, as OpenAI's API has them", SERVE_EXAMPLES, [verbose])
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)

    batch = add_verb("batch", "answer a file of requests, as OpenAI's batches have them", BATCH_EXAMPLES, [verbose])
    add_batch_arguments(batch)

    bench = add_verb("bench", "measure throughput or latency, also of a server", BENCH_EXAMPLES, [])
    add_benchmarks(bench, engine, verbose)

    plan = add_verb("plan", "say whether a model fits on a GPU that need not be there", PLAN_EXAMPLES, [verbose])
    add_plan_arguments(plan)
    return parser


def _engine_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="checkpoint directory or hub id (default: the embedded one)")
    group.add_argument("--dtype", default="auto", help="dtype of weights and KV (default: auto)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output, in tokens")
    add_speculative_options(group, default_draft_model="the embedded one")
    add_config_field_options(group)
    return parser


def _sampling_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("sampling (what is not given follows the checkpoint's generation_config.json)")
    group.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this mass")
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 is off")
    group.add_argument("--min-p", type=float, metavar="X", help="keep tokens this likely relative to the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this text; repeatable")
    return parser


def run_generate(args: argparse.Namespace) -> None:
    """Run `jaxinfer generate`: one prompt is streamed, several are printed in order once all are done."""
    if args.show_drafts and (len(args.prompts) > 1 or args.speculative is None):
        raise ValueError("--show-drafts shows the drafts of one prompt: give one, and --speculative METHOD")
    if args.show_denoising and len(args.prompts) > 1:
        raise ValueError("--show-denoising shows the blocks of one prompt: give one")
    grammar = structured_outputs(args)
    if args.show_constraints and (len(args.prompts) > 1 or grammar is None):
        raise ValueError("--show-constraints shows one answer: give one prompt, and a grammar such as --regex R")
    sources = True if args.show_drafts or args.show_constraints else None
    llm, params = _open(args, structured_outputs=grammar, return_token_sources=sources)
    if args.trace_schedule:
        from jaxinfer.cli.show_schedule import tracing

        with tracing(llm.core):
            _generate(args, llm, params)
    else:
        _generate(args, llm, params)


def _generate(args: argparse.Namespace, llm: LLM, params: SamplingParams) -> None:
    if not args.raw and not llm.get_tokenizer().hf.chat_template:
        raise ValueError("the checkpoint has no chat template: add --raw to continue the text as it is")
    prompts: list[Any] = args.prompts if args.raw else [[{"role": "user", "content": p}] for p in args.prompts]
    if args.show_drafts:
        from jaxinfer.cli.show_drafts import drafts_line, print_drafts

        outputs = [print_drafts(llm.stream(prompts[0], params), llm.get_tokenizer())]
        print(drafts_line(outputs[0]), file=sys.stderr)
    elif args.show_constraints:
        from jaxinfer.cli.show_constraints import constraints_line, print_constraints

        outputs = [print_constraints(llm.stream(prompts[0], params), llm.get_tokenizer())]
        print(constraints_line(llm.get_metrics()), file=sys.stderr)
    elif args.show_denoising:
        outputs = [_print_denoising(llm, prompts[0], params)]
    elif len(prompts) == 1:
        _, output = _print_stream(llm.stream(prompts[0], params))
        outputs = [output]
    else:
        outputs = llm.generate(prompts, params) if args.raw else llm.chat(prompts, params)
        for prompt, output in zip(args.prompts, outputs, strict=True):
            print(f"=== {prompt}\n{output.outputs[0].text}\n")
    if args.show_cache:
        _show_cache(llm, outputs)
    for output in outputs:
        _check(output)


def _print_denoising(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Show the rounds of an answer, then the answer; returns its output."""
    from jaxinfer.cli.show_denoising import DenoisingPicture
    from jaxinfer.strategies.diffusion import DiffusionStrategy

    strategy = llm.core.strategy
    if not isinstance(strategy, DiffusionStrategy):
        raise ValueError("--show-denoising goes with diffusion models, and this one decodes token by token")
    picture = DenoisingPicture(llm.get_tokenizer(), strategy.mask_token_id)
    strategy.listeners.append(picture)
    (output,) = (
        llm.generate([prompt], params, use_tqdm=False)
        if isinstance(prompt, str)
        else llm.chat([prompt], params, use_tqdm=False)
    )
    strategy.listeners.remove(picture)
    completion = output.outputs[0]
    print(f"\n{completion.text}")
    tokens, forwards = len(completion.token_ids), picture.num_forwards
    _check(output)
    print(f"{tokens} tokens in {forwards} forwards: {tokens / forwards:.1f} a forward", file=sys.stderr)
    return output


def run_chat(args: argparse.Namespace) -> None:
    """Run `jaxinfer chat`: every line of stdin is a user's turn, answered with the whole conversation as context."""
    llm, params = _open(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    for line in _user_lines(interactive):
        if line == "/exit":
            break
        if line == "/clear":
            messages = list(opening)
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            reply, output = _print_stream(llm.stream(turn, params))
            _check(output)
        except (ValueError, RuntimeError) as error:
            # A user can continue after a refused turn (too long, say); a script must get the error.
            if not interactive:
                raise
            print(f"jaxinfer: error: {_one_line(error)} (/clear starts afresh)", file=sys.stderr)
            continue
        messages = [*turn, {"role": "assistant", "content": reply}]
        if args.show_cache:
            _show_cache(llm, [output])


def run_convert(args: argparse.Namespace) -> None:
    """Run `jaxinfer convert`, the command line of `convert_checkpoint`."""
    from jaxinfer.checkpoint.convert import convert_checkpoint

    convert_checkpoint(
        args.source, args.destination, dtype=args.dtype, overwrite=args.overwrite, **config_options(args)
    )
    print(f"converted {args.source} to {args.destination}")


def _open(args: argparse.Namespace, **asked: Any) -> tuple[LLM, SamplingParams]:
    """Return the engine, and the checkpoint's sampling defaults overridden by the given options.

    Args:
        asked: further sampling parameters; None: not given.
    """
    from jaxinfer import LLM, SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    asked |= {name: getattr(args, name) for name in names}
    given = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(**given)  # a bad value is reported before a model is loaded
    llm = LLM(
        args.model, dtype=args.dtype, max_model_len=args.max_model_len, speculative_config=speculative_config(args),
        **config_options(args),
    )  # fmt: skip
    return llm, llm.default_sampling_params(**given)


def _print_stream(deltas: Iterable[RequestOutput]) -> tuple[str, RequestOutput]:
    """Print text as it lands and end the line; returns the whole text and the last output."""
    pieces = []
    for delta in deltas:
        text = delta.outputs[0].text
        pieces.append(text)
        print(text, end="", flush=True)
    print()
    return "".join(pieces), delta


def _check(output: RequestOutput) -> None:
    """Raise RuntimeError for an answer that has ended with an error."""
    if output.error is not None:
        raise RuntimeError(output.error)


def _show_cache(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    sys.stdout.flush()
    for number, output in enumerate(outputs, start=1):
        name = f"prompt {number}: " if len(outputs) > 1 else ""
        print(
            f"{name}{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached",
            file=sys.stderr,
        )
    print(llm.draw_prefix_cache(), file=sys.stderr)


def _user_lines(interactive: bool) -> Iterator[str]:
    """Yield the non-empty lines of stdin, stripped; with a prompt and line editing if interactive."""
    if interactive:
        import readline  # noqa: F401  (importing it gives `input` its line editing)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
