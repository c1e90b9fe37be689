"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import outrider
from outrider.cli.options import (
    Activations,
    Device,
    Dtype,
    KvOffload,
    MaxModelLen,
    OnChipLayers,
    Quantization,
    Reporter,
    Speculate,
    SpeculativeJson,
    TensorParallelMode,
    check_model,
    read_json,
    speculative,
)
from outrider.cli.output import tell
from outrider.config import MOST_LOGPROBS, is_unicode
from outrider.errors import ConfigError, reason_of

LEVELS = ("debug", "info", "warning", "error")
BACKLOG = 2048  # connections that wait to be taken
M_ARENA_MAX = -8  # of glibc's malloc.h


def serve(
    model: Annotated[
        str, typer.Argument(callback=check_model, help="Folder, GGUF file, hub id, smollm2, or embedded: tiny.")
    ],
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 for all, :: with those of IPv6.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any that is free.", min=0, max=65535)] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Listen at this Unix socket instead.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that requests must carry, repeatable. Default: $OUTRIDER_API_KEY.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API, repeatable. Default: MODEL as given.")
    ] = None,
    speculate: Speculate = None,
    speculative_config: SpeculativeJson = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Outputs that share a forward.")] = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens in one forward: of prompts, drafts, and one of each running output.")
    ] = 512,
    max_prefill_delay: Annotated[
        float, typer.Option(help="Seconds that reading prompts may add to a step of running outputs.", min=0)
    ] = 0.05,
    kv_memory: Annotated[
        int | None, typer.Option(help="Bytes for keys and values. Default: 90 % of what is free.", min=1)
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep what ended requests have read, for others that begin alike.")
    ] = True,
    kv_offload: KvOffload = False,
    on_chip_layers: OnChipLayers = 0,
    generation_config: Annotated[
        str, typer.Option(help="Where defaults of sampling come from: auto (the model's), vllm (none), or a folder.")
    ] = "auto",
    override_generation_config: Annotated[
        str | None, typer.Option(help="Defaults of sampling as JSON: '{\"temperature\": 0.7}'.")
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Outputs that may wait; while as many run as can, more are answered 503.", min=0)
    ] = 256,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait; more are answered 503.", min=1)
    ] = None,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request's body.", min=1)] = 16 * 2**20,
    max_n: Annotated[int, typer.Option(help="Most outputs of a prompt.", min=1)] = 128,
    max_stop_strings: Annotated[int, typer.Option(help="Most stop strings of a request.", min=1)] = 16,
    max_logprobs: Annotated[int, typer.Option(help="Most logprobs of a request.", min=0, max=MOST_LOGPROBS)] = 20,
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence until a stream says it lives.", min=0.1, max=86400)
    ] = 15,
    event_interval: Annotated[
        float,
        typer.Option(help="Seconds between frames of a stream; what comes meanwhile joins the next.", min=0, max=3600),
    ] = 0.05,
    drain: Annotated[
        float | None,
        typer.Option(
            help="Seconds that requests may go on after SIGTERM or Ctrl-C. Default: 30; on ranks 20.", min=0, max=86400
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call, repeatable; * for all. Default: none.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="File of a chat template in place of the model's.")] = None,
    reasoning: Annotated[
        bool, typer.Option(help="Tell reasoning apart from the answer, where the chat template has marks for it.")
    ] = True,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Let requests bring chat templates.")
    ] = False,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="TLS key.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="Authorities of clients' certificates.")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engines, on Ray Serve; see docs/deploy.md. Default: one, without Ray.", min=1)
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="With --replicas: start up to so many, as there is more to do.", min=1)
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks of an engine: with --replicas, else as many as torchrun starts.", min=1)
    ] = None,
    tensor_parallel_mode: TensorParallelMode = "gather",
    root_path: Annotated[str, typer.Option(help="Path under which a proxy shows the server.")] = "",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model by OpenAI's API (chat, responses, completions) and Anthropic's messages, with a chat page."""
    config = speculative(speculate, speculative_config)
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, not {log_format!r}")
    if log_level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, not {log_level!r}")
    keys = api_key or [key for key in [os.environ.get("OUTRIDER_API_KEY", "")] if key]
    tls = _tls(ssl_keyfile, ssl_certfile, ssl_ca_certs)
    root_path = "/".join(["", *filter(None, root_path.strip().split("/"))])
    named = {"api-key": keys, "served-model-name": served_model_name or [], "cors-origin": cors_origin or []}
    for flag, values in (named | {"root-path": [root_path] if root_path else []}).items():
        if not all(value.strip() for value in values):
            raise ConfigError(f"--{flag} is empty; give one, or leave it out")
        if not all(map(is_unicode, values)):
            raise ConfigError(f"--{flag} is not UTF-8")
    keep_one_arena()  # before there are threads, which come with what is imported
    try:
        from outrider.serve.app import create_app
        from outrider.serve.server import log_to_stderr, open_more_files, server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}; pip install 'outrider[serve]'") from None
    from outrider.async_llm import AsyncLLM
    from outrider.parallel import launched
    from outrider.serve.settings import Settings, checked, generation_defaults

    if drain is None:
        drain = 30.0 if launched()[1] == 1 else 20.0  # torchrun kills after 30, and ends take their time, too
    template = "" if chat_template is None else _template(chat_template)
    overrides: dict[str, Any] = {}
    if override_generation_config is not None:
        option = "--override-generation-config"
        overrides = checked(read_json(override_generation_config, option, '{"temperature": 0.7}'), option)
    defaults = generation_defaults(generation_config, Path()) if generation_config != "auto" else None
    log_to_stderr(log_format, log_level)
    limits: dict[str, Any] = {
        "max_model_len": max_model_len, "kv_offload": kv_offload, "on_chip_layers": on_chip_layers,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "kv_memory": kv_memory,
        "max_prefill_delay": max_prefill_delay, "enable_prefix_caching": enable_prefix_caching,
        "quantization": quantization, "activations": activations, "tensor_parallel_mode": tensor_parallel_mode,
    }  # fmt: skip
    own = model.encode(errors="replace").decode()  # the name of a file need not be UTF-8
    about: dict[str, Any] = {
        "names": served_model_name or [own], "api_keys": keys, "max_body": max_body, "max_n": max_n,
        "max_stop_strings": max_stop_strings, "max_logprobs": max_logprobs, "keep_alive": keep_alive, "drain": drain,
        "event_interval": event_interval, "cors_origins": cors_origin or [], "chat_template": template,
        "trust_chat_template": trust_request_chat_template, "reasoning": reasoning,
    }  # fmt: skip
    settings = Settings(**about)  # before minutes are spent on loading

    def sampled(path: Path) -> dict[str, Any]:
        return (generation_defaults("auto", path) if defaults is None else defaults) | overrides

    if replicas is not None:
        if uds is not None or tls:
            raise ConfigError("with --replicas, Ray Serve listens: leave --uds and --ssl-... to a proxy before it")
        if max_queued_tokens is not None:
            raise ConfigError("--replicas counts requests, not their tokens; use --max-queued-requests")
        try:
            from outrider.load import open_source
            from outrider.ray import run
        except ModuleNotFoundError as error:
            raise ConfigError(f"--replicas needs {error.name}; pip install 'outrider[ray]'") from None
        about["defaults"] = sampled(open_source(model).path)
        import torch

        on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())  # Ray hides others
        given = {"dtype": dtype, "device": device, "speculative_config": config, **limits}
        args = {
            "model": model, "replicas": replicas, "max_replicas": max_replicas,
            "max_queued_requests": max_queued_requests,
            "tensor_parallel_size": tensor_parallel_size or 1, "num_gpus": float(on_gpu),
            "llm": given, "server": about,
        }  # fmt: skip
        if "RAY_ADDRESS" not in os.environ:  # else others listen, on other machines
            with _listen(host, port) as free:
                port = free.getsockname()[1]
        run(args, host, port, root_path, tell)
        return
    if max_replicas is not None:
        raise ConfigError("--max-replicas belongs to --replicas, which says how many there are at least")
    open_more_files()
    listening = _listen(host, port) if uds is None else _listen_at(uds)  # before minutes are spent on loading
    with Reporter() as reporter:
        llm = outrider.LLM(
            model, speculative_config=config, dtype=dtype, device=device, progress=reporter,
            tensor_parallel_size=tensor_parallel_size, **limits,
        )  # fmt: skip
        reporter.close()
        llm.runner.progress = None
    settings = replace(settings, defaults=sampled(llm.checkpoint.path))
    engine = AsyncLLM(
        llm, max_queued_requests=max_queued_requests, max_queued_tokens=max_queued_tokens, event_interval=event_interval
    )
    where: dict[str, Any] = {"uds": str(uds)} if uds is not None else {"host": host, "port": port}
    running = server(create_app(engine, settings), engine, drain, root_path=root_path, **where, **tls)
    at = _url(listening, secure=bool(tls)) if uds is None else f"unix:{uds}"
    across = f", {llm.parallelism}" if llm.parallelism else ""
    tell(f"{settings.names[0]} at {at} ({llm.exactness}, {config.method}{across}); Ctrl-C ends it")
    running.run(sockets=[listening])
    if running.force_exit:  # by a second Ctrl-C, whatever became of the signals that uvicorn raises again
        raise KeyboardInterrupt


def _template(path: Path) -> str:
    try:
        found = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from None
    if not found.strip():
        raise ConfigError(f"--chat-template {path} is empty")
    return found


def _tls(key: Path | None, certificate: Path | None, authorities: Path | None) -> dict[str, Any]:
    """What uvicorn is told of TLS; nothing without. Raises ConfigError for files that cannot be used."""
    import ssl

    if (key is None) != (certificate is None):
        raise ConfigError("give --ssl-keyfile and --ssl-certfile together")
    if authorities is not None and certificate is None:
        raise ConfigError("--ssl-ca-certs needs --ssl-keyfile and --ssl-certfile; without them there is no TLS")
    for name, file in (("keyfile", key), ("certfile", certificate), ("ca-certs", authorities)):
        if file is not None and not file.is_file():
            raise ConfigError(f"--ssl-{name} {file} is not there, or no file")
    if key is None or certificate is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, "")  # with a password nobody would be asked for it
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (OSError, ValueError) as error:
        files = ", ".join(str(path) for path in (key, certificate, authorities) if path is not None)
        raise ConfigError(
            f"--ssl-...: {files}: {error}; give PEM files, the key's without a password and the certificate's own"
        ) from None
    asks = {} if authorities is None else {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    return {"ssl_keyfile": key, "ssl_certfile": certificate, "ssl_ca_certs": authorities, **asks}


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` is all addresses, as elsewhere
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = reason_of(error).partition(" (while")[0]
        raise ConfigError(f"cannot listen at {host or 'nothing'}, port {port}: {reason}; give another") from None


def _listen_at(path: Path) -> socket.socket:
    """A Unix socket that is listened at. One that a server left behind, so that nobody does, is replaced."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            listening.setblocking(False)
            try:
                with suppress(BlockingIOError):  # as many wait there as may
                    listening.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                listening.setblocking(True)
            else:
                raise ConfigError(f"--uds {path}: another server listens there; give another path")
        elif path.exists():
            raise ConfigError(f"--uds {path} is no socket, and is left as it is; give another path")
        listening.bind(str(path))
        path.chmod(0o666)  # as TCP: who may reach it is its folder's business
        listening.listen(BACKLOG)  # from now on: what nobody listens at is taken for left behind
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--uds {path} cannot be a socket: {reason_of(error)}; give a new name where you can write"
        ) from None
    return listening


def _url(listening: socket.socket, secure: bool) -> str:
    host, port = listening.getsockname()[:2]
    return f"http{'s' * secure}://{f'[{host}]' if ':' in host else host}:{port}"


def keep_one_arena() -> None:
    """Let all threads allocate from one arena, where the C library is glibc. It would give each its own, and each keeps
    for good what was once free between a forward's logits.
    """
    with suppress(AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
