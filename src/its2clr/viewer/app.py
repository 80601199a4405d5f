"""The routes of the viewer: JSON under `/api`, the page and its files, and nothing else."""

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.staticfiles import StaticFiles

from its2clr.cohort.slides.slide_image import SlideProblem
from its2clr.errors import InputError
from its2clr.viewer.bag_list import Question, SortName
from its2clr.viewer.marks import Mark
from its2clr.viewer.service import MissingError, Viewer

STATIC = Path(__file__).parent / "static"
_REVALIDATE = {"Cache-Control": "private, no-cache"}
"""The same address may show another run tomorrow: a browser has to ask whether its copy is still right."""

ModelKey = Annotated[str | None, Query(max_length=200)]


def create_app(viewer: Viewer) -> FastAPI:
    """The viewer as an ASGI app that answers everyone; `serve.Guard` checks who asks."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_bags(app, viewer)
    _add_pictures(app, viewer)
    _add_marks(app, viewer)

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=_REVALIDATE)

    app.mount("/static", _Static(directory=STATIC))
    return app


def _add_bags(app: FastAPI, viewer: Viewer) -> None:
    @app.get("/api/run")
    def run() -> JSONResponse:
        return _json(viewer.run())

    @app.get("/api/bags")
    def bags(
        model: ModelKey = None,
        split: Literal["train", "val", "test"] | None = None,
        query: Annotated[str, Query(max_length=500)] = "",
        sort: SortName = "bag",
        page: Annotated[int, Query(ge=0, le=10**9)] = 0,
        *,
        descending: bool = False,
        errors: bool = False,
    ) -> JSONResponse:
        return _json(viewer.bags(Question(viewer.model(model), split, query, errors, sort, descending, page)))

    @app.get("/api/bags/{number}")
    def bag(number: int) -> JSONResponse:
        return _json(viewer.bag(number))

    @app.get("/api/bags/{number}/scores")
    def scores(
        number: int, model: ModelKey = None, round_: Annotated[int | None, Query(alias="round")] = None
    ) -> JSONResponse:
        if round_ is not None:
            return _json(viewer.round_scores(number, round_))
        return _json(viewer.bag_scores(number, viewer.model(model)))

    @app.get("/api/bags/{number}/instances/{instance}")
    def instance(number: int, instance: int) -> JSONResponse:
        return _json(viewer.instance(number, instance))

    @app.get("/api/bags/{number}/instances/{instance}/neighbours")
    def neighbours(number: int, instance: int, model: ModelKey = None) -> JSONResponse:
        return _json(viewer.instance_neighbours(number, instance, viewer.model(model)))


def _add_pictures(app: FastAPI, viewer: Viewer) -> None:
    @app.get("/api/bags/{number}/thumbnail")
    def thumbnail(request: Request, number: int) -> Response:
        headers = _tagged(viewer.picture_tag(number))
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(viewer.thumbnail(number), media_type="image/jpeg", headers=headers)

    @app.get("/api/bags/{number}/annotation")
    def annotation(number: int) -> JSONResponse:
        return _json(viewer.annotation(number))

    @app.get("/api/bags/{number}/dzi")
    def dzi(number: int) -> JSONResponse:
        return _json(viewer.deep_zoom(number))

    @app.get("/api/bags/{number}/tiles/{level}/{column}_{row}.jpg")
    def tile(request: Request, number: int, level: int, column: int, row: int) -> Response:
        headers = _tagged(viewer.picture_tag(number, level, column, row))
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(viewer.picture_tile(number, level, column, row), media_type="image/jpeg", headers=headers)

    @app.get("/api/bags/{number}/instances/{instance}/image")
    def image(request: Request, number: int, instance: int) -> Response:
        headers = _tagged(viewer.picture_tag(number, instance))
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        encoded, kind = viewer.instance_image(number, instance)
        return Response(encoded, media_type=f"image/{kind}", headers=headers)


def _add_marks(app: FastAPI, viewer: Viewer) -> None:
    @app.get("/api/bags/{number}/marks")
    def marks(number: int) -> JSONResponse:
        return _json(viewer.marked(number))

    @app.post("/api/bags/{number}/marks")
    def mark(number: int, mark: Mark) -> JSONResponse:
        return _json(viewer.mark(number, mark))

    @app.delete("/api/bags/{number}/marks/last")
    def undo(number: int) -> JSONResponse:
        return _json(viewer.undo_mark(number))


def _add_errors(app: FastAPI) -> None:
    """Every error is JSON with a `detail` that can be shown."""

    @app.exception_handler(MissingError)
    def missing(_: Request, error: MissingError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(InputError)
    def unreadable(_: Request, error: InputError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 500)

    @app.exception_handler(SlideProblem)
    def damaged(_: Request, error: SlideProblem) -> JSONResponse:
        return JSONResponse({"detail": f"the slide {error}"}, 500)

    @app.exception_handler(RequestValidationError)
    def refused(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["loc"][0] == "path":
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)


def _json(value: dict[str, Any]) -> JSONResponse:
    return JSONResponse(value, headers={"Cache-Control": "no-store"})


def _tagged(tag: str) -> dict[str, str]:
    return {"ETag": f'"{tag}"', **_REVALIDATE}


class _Static(StaticFiles):
    """The files of the page; a browser checks for newer ones, so that an update is seen."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_REVALIDATE)
        return response
