"""F2: a decoder serves one request at a time, and gets back from every way in which a request can end."""

import gc
import threading
from collections.abc import Callable

import pytest
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.errors import RequestError

MODES = ["ar", "sd", "ssd"]
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def decoder(load_tiny: Callable[..., Decoder]) -> Decoder:
    return load_tiny("llama", drafter="self")


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> str:
    return decoder.generate("lease", "ar", **OPTIONS).text


@pytest.mark.parametrize("mode", MODES)
def test_a_second_request_is_refused_and_the_first_goes_on(mode: str, decoder: Decoder, expected: str) -> None:
    """F2: in all modes; the refusal names the first request; its text is what it is alone."""
    stream = decoder.stream("lease", mode, **OPTIONS)
    pieces = [next(stream)]
    for second in (decoder.generate, decoder.stream):
        with pytest.raises(RequestError, match=rf"another request: mode {mode}, a prompt of 5 tokens, [1-9]\d* of at most 12"):
            second("another", mode, max_new_tokens=40)
    assert "".join([*pieces, *stream]) == expected == stream.result.text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["exhausted", "closed", "with", "dropped", "dropped unread", "failed", "interrupted"])
def test_every_end_gives_the_decoder_back(end: str, mode: str, decoder: Decoder, expected: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: also a stream that was never read."""
    stream = decoder.stream("some other prompt", mode, **OPTIONS)
    if end == "exhausted":
        assert "".join(stream) == stream.result.text
    elif end == "closed":
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
        with pytest.raises(RequestError, match="closed before its end"):
            _ = stream.result
    elif end == "with":
        with stream as pieces:
            next(pieces)
    elif end in ("failed", "interrupted"):
        error = MemoryError if end == "failed" else KeyboardInterrupt
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(decoder.model, "forward", lambda *_: (_ for _ in ()).throw(error()))
            with pytest.raises(error):
                list(stream)
    else:
        if end == "dropped":
            next(stream)
        del stream
        gc.collect()
    assert decoder.generate("lease", mode, **OPTIONS).text == expected


def test_a_refused_request_takes_nothing(decoder: Decoder, expected: str) -> None:
    """F2: an argument that is refused leaves the decoder free."""
    with pytest.raises(RequestError):
        decoder.stream("x", "sd", max_new_tokens=0)
    assert decoder.generate("lease", **OPTIONS).text == expected


@pytest.mark.parametrize("mode", MODES)
def test_two_threads_never_share_a_decoder(mode: str, decoder: Decoder, expected: str) -> None:
    """F2: eight threads at once: each request is served whole or refused."""
    texts: list[str] = []
    refused: list[RequestError] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        try:
            texts.append(decoder.generate("lease", mode, **OPTIONS).text)
        except RequestError as e:
            refused.append(e)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) + len(refused) == 8
    assert texts
    assert set(texts) == {expected}
    assert all("another request" in str(e) for e in refused)


def test_a_stream_is_closed_from_another_thread(decoder: Decoder, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: while its reader is inside a round, another reader is refused, and closing takes effect after the round."""
    stream = decoder.stream("some other prompt", "sd", **OPTIONS)
    next(stream)
    inside, go_on, forward = threading.Event(), threading.Event(), decoder.model.forward

    def slow(*arguments: object) -> object:
        inside.set()
        assert go_on.wait(60)
        return forward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.model, "forward", slow)
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        assert inside.wait(60)
        with pytest.raises(RequestError, match="read by another thread"):
            next(stream)
        stream.close()
        with pytest.raises(RequestError, match="another request"):
            decoder.generate("lease")
        go_on.set()
        reader.join()
    assert decoder.generate("lease", "sd", **OPTIONS).text == expected
