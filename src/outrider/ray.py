"""Replicas on Ray Serve: an ingress that speaks HTTP and knows no weights, and engines behind it.

`outrider.ray:app` builds the application, for `serve run`, a YAML file or `outrider serve --replicas`. The ingress is
our server's own app: it tokenizes, forms prompts and answers. An engine is an AsyncLLM, on one device or cut over a
group of ranks; it gets token ids and gives steps. Requests that begin alike go to the same engine as long as that has
not much more to do than others (serve/replicas.py). If an engine dies, its answers go on at another, token for token.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import RequestRouter

from outrider import drafters
from outrider.async_llm import AsyncLLM, Lanes, left
from outrider.config import EngineConfig, SamplingParams, SpeculativeConfig, drawn_seed, whole
from outrider.errors import ConfigError, EngineError, OutriderError, QueueFull, RequestError, brief, told
from outrider.llm import LLM
from outrider.load import open_source
from outrider.outputs import StepEvent
from outrider.serve.app import create_app
from outrider.serve.replicas import Lost, beginning, ranked, resumed
from outrider.serve.settings import Settings, check_numbers, generation_defaults

NAME, ENGINE = "outrider", "Engine"
LAST_WORDS = 10.0  # seconds for engines to end once they have drained
HEALTH = 5.0  # seconds between questions whether an engine is well


@dataclass
class Replicas:
    """An application. `llm` are keywords of LLM, `server` fields of Settings. Raises ConfigError."""

    model: str
    replicas: int = 1  # engines; with max_replicas, at least so many
    max_replicas: int | None = None  # more are started as there is more to do, up to so many
    target_ongoing_requests: float = 8.0  # of an engine, that autoscaling aims at
    upscale_delay: float = 10.0  # seconds of more, or less, to do, until it acts
    downscale_delay: float = 120.0
    max_ongoing_requests: int = 64  # of an engine; more wait before it
    max_queued_requests: int = 256  # those that wait; more are answered 503
    slack: int = 4  # requests that an engine may have beyond the idlest, for the sake of what it has read
    tensor_parallel_size: int = 1  # ranks of an engine, all on one machine
    num_cpus: float = 1.0  # that Ray reserves for each rank
    num_gpus: float = 0.0
    ingresses: int = 1
    ingress_cpus: float = 0.0  # what waits for engines takes no core from them
    llm: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Replicas:
        """From the `args` of a YAML file."""
        known = [item.name for item in fields(Replicas)]
        if unknown := [key for key in given if key not in known]:
            raise ConfigError(f"unknown key {unknown[0]!r}; valid: {', '.join(known)}")
        if "model" not in given:
            raise ConfigError("args need a 'model', such as model: tiny")
        found = Replicas(**given)
        if not isinstance(found.model, str):
            raise ConfigError(f"model must be a text, not {brief(found.model)}")
        for name in ("replicas", "max_ongoing_requests", "tensor_parallel_size", "ingresses", "max_replicas"):
            value = getattr(found, name)
            if whole(value, 1) is None and not (name == "max_replicas" and value is None):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {brief(value)}")
        check_numbers(found)
        for name in ("llm", "server"):
            if not isinstance(value := getattr(found, name), dict):
                raise ConfigError(f"{name} must be an object, not {brief(value)}")
        if found.max_replicas is not None and found.max_replicas < found.replicas:
            raise ConfigError(f"max_replicas ({found.max_replicas}) is below replicas ({found.replicas})")
        own = {item.name for item in fields(EngineConfig)}
        own |= {"dtype", "device", "quantization", "activations", "speculative_config", "tensor_parallel_mode"}
        if bad := [key for key in found.llm if key not in own]:
            raise ConfigError(f"llm: unknown key {bad[0]!r}; valid: {', '.join(sorted(own))}")
        limits = [item.name for item in fields(Settings)]
        if bad := [key for key in found.server if key not in limits]:
            raise ConfigError(f"server: unknown key {bad[0]!r}; valid: {', '.join(limits)}")
        drafters.create(SpeculativeConfig.of(found.llm.get("speculative_config")))
        EngineConfig(**{item.name: found.llm[item.name] for item in fields(EngineConfig) if item.name in found.llm})
        _ = found.settings  # which says what is wrong with them
        return found

    @property
    def settings(self) -> Settings:
        """Of the ingress."""
        return Settings(**{"names": (self.model,), **self.server})


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of these `args`, the fields of Replicas."""
    plan = Replicas.of(args)
    scaling: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.max_replicas is not None:
        bounds = {"min_replicas": plan.replicas, "max_replicas": plan.max_replicas}
        delays = {"upscale_delay_s": plan.upscale_delay, "downscale_delay_s": plan.downscale_delay}
        target = {"target_ongoing_requests": plan.target_ongoing_requests}
        scaling = {"autoscaling_config": {**bounds, **delays, **target}}
    own = {"CPU": plan.num_cpus} | ({"GPU": plan.num_gpus} if plan.num_gpus else {})
    if plan.tensor_parallel_size > 1:
        scaling["placement_group_bundles"] = [own] * plan.tensor_parallel_size
        scaling["placement_group_strategy"] = "STRICT_PACK"
    router = {"request_router_class": "outrider.ray:PrefixRouter", "request_router_kwargs": {"slack": plan.slack}}
    engine = serve.deployment(
        Engine, name=ENGINE, ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        max_ongoing_requests=plan.max_ongoing_requests, max_queued_requests=plan.max_queued_requests,
        health_check_period_s=HEALTH, health_check_timeout_s=6 * HEALTH,
        graceful_shutdown_timeout_s=plan.settings.drain, request_router_config=router, **scaling,
    )  # fmt: skip

    def build() -> Any:
        return ingress(plan, serve.get_deployment_handle(ENGINE, serve.get_replica_context().app_name))

    door = serve.deployment(
        serve.ingress(build)(), name="Ingress", num_replicas=plan.ingresses,
        ray_actor_options={"num_cpus": plan.ingress_cpus}, max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=plan.settings.drain,
    )  # fmt: skip
    return door.bind(engine.bind(plan))


class PrefixRouter(RequestRouter):
    """Same beginning, same engine, unless that has `slack` requests more than the idlest."""

    def initialize_state(self, slack: int = 4) -> None:
        """With the keywords of the deployment's configuration."""
        self.slack = slack

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One after the other, in this order: the first that has room takes it."""
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(r.replica_id) or 0 for name, r in known.items()}
        key = pending_request.args[0] if pending_request is not None and pending_request.args else ""
        return [[known[name]] for name in ranked(str(key), loads, self.slack)]


class Engine:
    """One replica: an AsyncLLM, or rank 0 of a group."""

    def __init__(self, plan: Replicas) -> None:
        self.stall, options = plan.settings.stall, dict(plan.llm)
        if plan.tensor_parallel_size > 1:
            _gather_ranks(plan)
        options |= {"event_interval": plan.settings.event_interval, "tensor_parallel_size": plan.tensor_parallel_size}
        self.llm = AsyncLLM(plan.model, **options)
        if self.llm.llm.ranks is not None:
            self.llm.llm.ranks.on_end = None  # who reads here goes on elsewhere, the sooner the better

    async def generate(
        self, key: str, prompts: list[tuple[list[int], SamplingParams]], options: dict[str, Any], begun: list[list[int]]
    ) -> AsyncGenerator[Any, None]:
        """First None, once the requests are accepted; then each event, and with an output's first what it says of the
        prompt: how much was known, and logprobs."""
        answer, seen = None, set[int]()
        engine = self.llm.llm.engine
        for i, (ids, params) in enumerate(prompts):  # who asks for all that may come gets what there is memory for
            if params.max_tokens >= engine.max_len - len(ids):
                prompts[i] = ids, params.having(max_tokens=max(1, min(params.max_tokens, engine.longest - len(ids))))
        try:
            answer = await self.llm.start(prompts, **options, begun=begun)
            yield None
            async for event in answer.events():
                request = answer.requests[event.index]
                yield event, None if event.index in seen else (request.cached, request.prompt_logprobs)
                seen.add(event.index)
        except (ConfigError, RequestError) as error:
            yield error  # the request's own fault; what is raised Serve would log, trace and all
        finally:
            if answer is not None:
                answer.close()

    def check_health(self) -> None:
        """Asked by Serve every few seconds; what raises here is replaced."""
        if (stalled := self.llm.stalled) > self.stall:
            raise EngineError(f"the engine has not come to the end of a step for {stalled:.0f} seconds")

    async def __del__(self) -> None:
        if hasattr(self, "llm"):  # else it could not even be loaded
            await self.llm.aclose()


def _gather_ranks(plan: Replicas) -> None:
    """Start the other ranks beside this replica, in its placement group, and take the place of rank 0."""
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    size = str(plan.tensor_parallel_size)
    env = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group, ranks = get_current_placement_group(), []
    for rank in range(1, plan.tensor_parallel_size):
        beside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus, "scheduling_strategy": beside}
        ranks.append(ray.remote(_Rank).options(**options).remote())
        ranks[-1].run.remote({**env, "RANK": str(rank), "LOCAL_RANK": "0"})  # Ray shows each its own device
    _held.extend(ranks)
    os.environ.update({**env, "RANK": "0", "LOCAL_RANK": "0"})


_held: list[Any] = []  # an actor ends when nobody holds it


class _Rank:
    """A rank that replays."""

    def run(self, env: dict[str, str]) -> None:
        """To the end of rank 0."""
        from outrider.follow import join

        os.environ.update(env)
        join()


# --- the ingress -----------------------------------------------------------------------------------------------------


def ingress(plan: Replicas, engines: Any) -> Any:
    """Our server's app, before engines."""
    far = Far(Words(plan), engines)
    settings = plan.settings
    if "defaults" not in plan.server:
        settings = replace(settings, defaults=generation_defaults("auto", far.llm.checkpoint.path))
    return create_app(far, settings)  # type: ignore[arg-type]


class Words(LLM):
    """What an LLM knows without weights: tokens, templates, limits."""

    def __init__(self, plan: Replicas) -> None:
        source = open_source(plan.model)
        self.tokenizer = source.tokenizer()
        self.checkpoint: Any = SimpleNamespace(path=source.path)
        self.runner: Any = SimpleNamespace(model=SimpleNamespace(config=source.config))
        self._speculative = SpeculativeConfig.of(plan.llm.get("speculative_config"))
        k = drafters.create(self._speculative).num_speculative_tokens
        most = plan.llm.get("max_model_len") or source.config.context
        self.engine: Any = SimpleNamespace(max_len=most, longest=most, k=k)


class Far:
    """As an AsyncLLM, for the app: its engines are elsewhere."""

    def __init__(self, llm: Words, engines: Any) -> None:
        self.llm, self._engines = llm, engines
        self.closed, self.stalled, self.watch = False, 0.0, None
        self._lanes = Lanes()
        self.off_loop = self._lanes.run

    def reading(self, weight: int) -> nullcontext[None]:
        """Each engine says itself whether it has room."""
        return nullcontext()

    async def start(self, prompts: list[tuple[list[int], SamplingParams]], **options: Any) -> FarAnswer:
        """As AsyncLLM's. Seeds are drawn here, so that another engine would draw the same tokens."""
        seeded = [(ids, params.having(seed=drawn_seed()) if params.seed is None else params) for ids, params in prompts]
        answer = FarAnswer(self._engines, seeded, options)
        await answer.open()
        return answer

    async def aclose(self) -> None:
        """Nothing else is held here."""
        self.closed = True
        self._lanes.close()


class FarAnswer:
    """As an Answer; what comes is an engine's, and another's if that one is lost."""

    def __init__(self, engines: Any, prompts: list[tuple[list[int], SamplingParams]], options: dict[str, Any]) -> None:
        self.requests = [
            SimpleNamespace(cached=0, prompt_logprobs=None, seq=SimpleNamespace(params=params))
            for _, params in prompts for _ in range(params.n)
        ]  # fmt: skip
        self._began = time.perf_counter()
        self._engines, self._prompts, self._options = engines, prompts, options
        self._key = beginning(prompts[0][0], options.get("cache_salt"))
        self._stream: Any = None  # that an engine has accepted, and nobody reads yet
        self._told = set[int]()  # outputs of which it is known what the prompt is like

    async def open(self) -> None:
        """Wait until an engine has accepted the requests. Raises what it refuses them with."""
        for _ in range(3):
            with suppress(Lost):
                self._stream = await self._begin([[] for _ in self.requests])
                return
        raise EngineError("no engine can be reached; try again later")

    async def events(self) -> AsyncGenerator[StepEvent, None]:
        """Each token once."""
        async for event in resumed(self._attempt, len(self.requests)):
            yield event

    async def _attempt(self, begun: list[list[int]]) -> AsyncGenerator[StepEvent, None]:
        stream, self._stream = self._stream, None
        if stream is None:
            stream = await self._begin(begun)
        try:
            async for event, about in _typed(stream):
                if about is not None and event.index not in self._told:
                    self.requests[event.index].cached, self.requests[event.index].prompt_logprobs = about
                    self._told.add(event.index)
                yield event
        finally:
            stream.cancel()

    async def _begin(self, begun: list[list[int]]) -> Any:
        deadline = left(self._options.get("deadline"), self._began)  # counted from the start, whoever writes
        options = {**self._options, "deadline": deadline}
        stream = self._engines.options(stream=True).generate.remote(self._key, self._prompts, options, begun)
        try:
            async for _ in _typed(stream):
                return stream
        except BaseException:  # whoever asked has gone, too
            stream.cancel()
            raise
        raise Lost

    def close(self) -> None:
        """Stop what has not been read."""
        if self._stream is not None:
            self._stream.cancel()


async def _typed(stream: Any) -> AsyncGenerator[Any, None]:
    """What a replica gives, with its own errors; Lost if it has gone, or closes."""
    while True:
        try:
            item = await stream.__anext__()
        except StopAsyncIteration:
            return
        except BackPressureError as error:
            raise QueueFull(f"too many requests wait for an engine: {error}") from None
        except RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise Lost from None
            raise error.cause from None
        except (RayError, RayServeException) as error:
            raise Lost from error
        if isinstance(item, OutriderError):
            raise item
        yield item


# --- the command line ------------------------------------------------------------------------------------------------


def run(
    args: Mapping[str, Any], host: str, port: int, root_path: str = "", tell: Callable[[str], None] = print
) -> None:
    """Serve on the Ray that there is (RAY_ADDRESS), or a new one on this machine, until SIGTERM or Ctrl-C.

    Then no more requests are taken, and those there are may go on for `drain` seconds. `tell` hears where it listens.
    """
    plan, alone = Replicas.of(args), not os.environ.get("RAY_ADDRESS")
    engines = max(plan.replicas, plan.max_replicas or 0) * plan.tensor_parallel_size
    if alone and not plan.num_gpus:  # as many CPUs as Ray reserves for an engine, so many threads it has
        plan.num_cpus = max(1, torch.get_num_threads() // engines)
    application = app({**args, "num_cpus": plan.num_cpus})  # what is wrong is known before anything is started
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {}
    if alone:  # what was asked for is started, on however few cores
        needed = engines * plan.num_cpus + plan.ingresses * plan.ingress_cpus
        own = {"address": "local", "num_cpus": max(os.cpu_count() or 1, math.ceil(needed))}
    deployed = False
    try:
        ray.init(log_to_driver=True, include_dashboard=False, **own)
        for number in ENDINGS:  # ray.init has set its own
            signal.signal(number, _end)
        serve.start(http_options={"host": host, "port": port, "root_path": root_path})
        deployed = True
        serve.run(application, name=NAME)  # until all engines have started, and those that have may be at work
        tell(f"{plan.settings.names[0]} at http://{host}:{port}{root_path} (replicas: {plan.replicas}); Ctrl-C ends it")
        threading.Event().wait()
    except _Ended:
        if own and _gone():
            tell("Ray was ended, too, and with it all answers: send SIGTERM to this process alone")
            os._exit(128 + signal.SIGTERM)  # all else would wait a minute for it
        if deployed:
            _drained(plan.settings.drain, alone=bool(own))
    except Exception as error:  # Ray raises what it likes: no machine at the address, a port that is taken, no start
        raise EngineError(f"Ray does not serve: {told(error)}") from None
    if own:  # elsewhere there may be others' applications
        serve.shutdown()
    ray.shutdown()


ENDINGS = signal.SIGTERM, signal.SIGINT


class _Ended(BaseException):
    """Someone wants us to end."""


def _end(*_: Any) -> None:
    for number in ENDINGS:  # once is enough
        signal.signal(number, signal.SIG_IGN)
    raise _Ended


def _gone() -> bool:
    """Whether the Ray that we started is ending, as when a signal went to all processes of a group."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    time.sleep(1)  # it takes a moment
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return True
    return False


def _drained(seconds: float, alone: bool) -> None:
    """Take no more requests, and wait for those there are; `alone`: this Ray ends with us, Serve's proxies, too."""
    serve.delete(NAME, _blocking=False)
    until = time.monotonic() + seconds + LAST_WORDS
    while (NAME in serve.status().applications or (alone and _relaying())) and time.monotonic() < until:
        time.sleep(0.2)


def _relaying() -> bool:
    """Whether Serve's proxies have not passed on all answers: they would be cut, though the ingress has gone."""
    for about in ray.util.list_named_actors(all_namespaces=True):
        if about["name"].startswith("SERVE_PROXY_ACTOR"):
            try:
                proxy: Any = ray.get_actor(about["name"], about["namespace"])
                if ray.get(proxy.__ray_call__.remote(lambda own: own.http_proxy._ongoing_requests), timeout=5):
                    return True
            except GetTimeoutError:  # whoever is too busy to say
                return True
            except (RayError, ValueError):  # it has gone, or is another version's
                continue
    return False
