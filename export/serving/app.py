"""The HTTP interface of the prediction server: predictions, health, and metrics in Prometheus' text format.

Errors are JSON and name the next step.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from export.errors import QueueFullError, RefusedError
from export.model.image_files import Classified
from export.model.runtime import Floats, Model
from export.serving.batcher import Batcher, Predict
from export.serving.live_model import Candidate, ServedModel
from export.serving.request_bodies import Bodies, Limits, NamedInput, check_type, read_inputs
from fedcg.input_form import taken_in_words
from fedcg.text_output import wrong_value

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
IDENTITY = ("federation", "round", "version", "sha256")


class Metrics:
    """All metrics of one server; thread-safe."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        self.requests = counter("fedcg_serve_requests", "Prediction requests, by outcome.", ["outcome"])
        duration = "Seconds from a request's first byte to its response."
        self.seconds = histogram("fedcg_serve_request_seconds", duration, buckets=SECONDS_BUCKETS)
        self.batches = histogram("fedcg_serve_batch_images", "Images per batch.", buckets=IMAGES_BUCKETS)
        self.classes = counter("fedcg_serve_predictions", "Images, by likeliest class.", ["class"])
        self.loads = counter("fedcg_serve_model_loads", "New versions, by outcome.", ["outcome"])
        self.rollbacks = counter("fedcg_serve_rollbacks", "Versions rolled back, by reason.", ["reason"])
        self._queue = gauge("fedcg_serve_queue_images", "Images accepted but not answered yet.")
        self._ready = gauge("fedcg_serve_ready", "1 while predictions are served.")
        self._model = gauge("fedcg_serve_model_info", "The model in service.", IDENTITY)
        compared = "Images compared between the candidate and the version in service."
        self._candidate = gauge("fedcg_serve_candidate_images", compared, ["version"])

    def text(self, served: Model | None, candidate: Candidate | None, *, queue: int, is_ready: bool) -> bytes:
        """The metrics page.

        Args:
            served: the model in service.
            candidate: the version being compared with it.
            queue: images accepted but not answered yet.
            is_ready: whether predictions are served.
        """
        self._queue.set(queue)
        self._ready.set(is_ready)
        self._model.clear()
        if served is not None:
            file = served.served.file or served.manifest.model
            self._model.labels(**served.identity(), sha256=file.sha256).set(1)
        self._candidate.clear()
        if candidate is not None:
            self._candidate.labels(candidate.model.version).set(candidate.progress.images)
        return generate_latest(self._registry)


POLL_S = 0.5
"""Seconds between checks for a new version; a check reads the pointer and the dates of a few files."""
DECODERS = 2
DEFAULT_TOP = 3
GONE = 499  # the client disconnected before the response
OF_STATUS, OTHER_STATUS = {404: "not_found", 405: "wrong_method"}, "refused"
"""Error codes of requests that the framework rejects."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """State shared by the routes.

    Args:
        models: the model in service; kept up to date while the application runs.
        batcher: runs predictions; started and closed with the application.
        limits: limits of one request.
        metrics: counters of the server.
    """

    def __init__(self, models: ServedModel, batcher: Batcher, limits: Limits, metrics: Metrics) -> None:
        self.models, self.batcher, self.limits, self.metrics = models, batcher, limits, metrics
        self._bodies = Bodies(limits)
        self.in_flight = 0
        self.is_draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the first version, then predict and follow new versions while the context lasts."""
        await asyncio.to_thread(self.models.refresh)
        with ThreadPoolExecutor(DECODERS, "decode") as self._decoders:
            async with self.batcher.running():
                watch = asyncio.create_task(self._watch())
                try:
                    yield
                finally:
                    watch.cancel()
                    with suppress(asyncio.CancelledError):
                        await watch
                    self.models.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                for verdict in await asyncio.to_thread(self.models.look):
                    self.metrics.rollbacks.labels(verdict.kind).inc()
            except Exception:
                log.exception("checking for a new version failed; the version in service does not change")

    def served(self) -> Model:
        """The model in service.

        Raises:
            RefusedError: no model is in service, or the server is shutting down.
        """
        if self.is_draining:
            raise RefusedError(503, "draining", "the server is shutting down; retry after its restart", retry_after_s=5)
        if self.models.current is None:
            message = f"{self.models.refused}; see /readyz for when a model is ready"
            raise RefusedError(503, "no_model", message, retry_after_s=5)
        return self.models.current

    async def predict(self, request: Request, top: int) -> dict[str, object]:
        """Answer one request: results as in `fedcg infer --json`, with the model's identity.

        Raises:
            RefusedError: the request cannot be answered.
            ClientDisconnect: the client disconnected; remaining work is cancelled.
        """
        served = self.served()
        content_type = request.headers.get("content-type", "")
        check_type(content_type, served.manifest.input)
        async with self._bodies.read(request.stream(), _declared(request)) as content:
            with self.batcher.place() as predict:
                work = self._answer(predict, served, content, content_type)
                inputs, rows = await _unless_gone(request, work)
        # Only after the response is on its way.
        asyncio.get_running_loop().call_soon(self.models.answered, served, [one for _, one in inputs], rows)
        results = [Classified.of(served, name, row, top) for (name, _), row in zip(inputs, rows, strict=True)]
        for one in results if served.manifest.classes else ():
            self.metrics.classes.labels(one.guesses[0].label).inc()
        return {**served.identity(), "results": [one.as_json() for one in results]}

    async def _answer(
        self, predict: Predict, served: Model, content: bytes, content_type: str
    ) -> tuple[list[NamedInput], Floats]:
        decode = partial(read_inputs, content, content_type, served.manifest.input, self.limits)
        inputs = await asyncio.get_running_loop().run_in_executor(self._decoders, decode)
        try:
            return inputs, await predict(served, [one for _, one in inputs])
        except QueueFullError:
            raise
        except Exception:
            self.models.failed(served)
            raise


def create_app(service: Service) -> FastAPI:
    """Create the application of one server."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    application = FastAPI(
        title="FedCG Edge predictions",
        version=version("fedcg-edge"),
        lifespan=life,
        docs_url=None,  # the pages would load scripts from other hosts; /openapi.json is served
        redoc_url=None,
    )
    application.state.service = service
    application.include_router(router)
    application.add_exception_handler(RequestValidationError, _bad_request)
    application.add_exception_handler(RefusedError, _refused)
    application.add_exception_handler(HTTPException, _http_error)
    return application


async def _service(request: Request) -> Service:  # a plain function would need a thread switch per request
    service: Service = request.app.state.service
    return service


Running = Annotated[Service, Depends(_service)]
router = APIRouter()


@router.post("/predict")
async def predict(request: Request, service: Running, top: Annotated[int, Query(ge=1)] = DEFAULT_TOP) -> Response:
    """Classify images or tensors. GET /model describes the input that the model takes.

    Images: the bytes of one image, or JSON {"images": arrays}. Tensors: one npy array with one tensor or a
    batch (application/x-npy or application/octet-stream), or JSON {"inputs": arrays}.
    """
    started = time.perf_counter()
    service.in_flight += 1
    outcome = "internal"
    try:
        answer = JSONResponse(await service.predict(request, top))
        outcome = "ok"
    except RefusedError as error:
        answer, outcome = _refusal(error), error.code
    except ClientDisconnect:
        answer, outcome = JSONResponse(None, GONE), "cancelled"
    except Exception:
        log.exception("a prediction failed")
        message = "the prediction failed; see the server's log"
        answer = _refusal(RefusedError(500, "internal", message))
    finally:
        service.in_flight -= 1
        service.metrics.requests.labels(outcome).inc()
        service.metrics.seconds.observe(time.perf_counter() - started)
    return answer


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the process responds."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: Running) -> dict[str, object]:
    """Whether predictions are served. 503 with a reason while there is no usable model or the server is shutting down."""
    return {"status": "ok", **service.served().identity()}


@router.get("/model")
async def model(service: Running) -> dict[str, object]:
    """The model in service: manifest, execution providers, start of service; the candidate, or why a newer version was refused."""
    served, candidate = service.served(), service.models.candidate
    return {
        **served.identity(),
        "since": service.models.since.isoformat(),
        "providers": list(served.predictor.providers),
        "variant": served.served.name,
        "takes": taken_in_words(served.manifest.input),
        "candidate": candidate.as_json() if candidate else None,
        "refused": service.models.refused or None,
        "taken_back": service.models.taken_back or None,
        "manifest": served.manifest.model_dump(mode="json"),
    }


@router.get("/metrics")
async def metrics(service: Running) -> Response:
    """Metrics in Prometheus' text format."""
    served, candidate = service.models.current, service.models.candidate
    is_ready = served is not None and not service.is_draining
    text = service.metrics.text(served, candidate, queue=service.batcher.length, is_ready=is_ready)
    return Response(text, media_type=METRICS_TYPE)


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


async def _unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect if the client disconnects."""
    working, gone = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


def _refusal(error: RefusedError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.as_json(), error.status, headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(error)


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    (await _service(request)).metrics.requests.labels("bad_request").inc()
    first = error.errors()[0]
    field = str(first["loc"][-1])
    return _refusal(RefusedError(422, "bad_request", f"{field}: {wrong_value(first)}; see /openapi.json", field=field))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = OF_STATUS.get(error.status_code, OTHER_STATUS)
    return _refusal(RefusedError(error.status_code, code, f"{error.detail}; see /openapi.json for the available paths"))
