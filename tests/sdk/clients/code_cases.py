"""The code interpreter."""

from __future__ import annotations

from cases import Site, case, got, raises
from e2b import NotFoundException, SandboxException, TimeoutException


@case("run_code")
async def run_code(site: Site) -> None:
    run = site.sandbox.run_code
    done = await got(run("import sys; kept = 40; print('out'); print('err', file=sys.stderr); kept + 2"))
    assert done.text == "42" and done.error is None and done.execution_count, done
    assert (done.logs.stdout, done.logs.stderr) == (["out\n"], ["err\n"])
    assert (await got(run("kept"))).text == "40"


@case("run_code: results, errors")
async def results(site: Site) -> None:
    run = site.sandbox.run_code
    done = await got(run("from IPython.display import HTML, display; display(HTML('<b>b</b>')); {'a': 1}"))
    shown, main = done.results
    assert shown.html == "<b>b</b>" and main.is_main_result and main.json == {"a": 1}
    failed = await got(run("1 / 0"))
    assert failed.error.name == "ZeroDivisionError" and "1 / 0" in failed.error.traceback


@case("run_code: callbacks")
async def callbacks(site: Site) -> None:
    seen: list[object] = []
    await got(
        site.sandbox.run_code(
            "print('line'); 7\n",
            on_stdout=lambda line: seen.append(line.line),
            on_result=lambda result: seen.append(result.text),
            on_error=seen.append,
        )
    )
    assert seen == ["line\n", "7"], seen


@case("run_code: envs, the sandbox's own too")
async def envs(site: Site) -> None:
    code = "import os; [os.environ.get(name) for name in ('HERE', 'MINE')]"
    assert (await got(site.sandbox.run_code(code, envs={"HERE": "ü"}))).results[0].json == ["ü", 'it\'s "so"']
    assert (await got(site.sandbox.run_code(code))).results[0].json == [None, 'it\'s "so"']


@case("run_code past its timeout")
async def timeout(site: Site) -> None:
    endless = "import time; count = 0\nwhile True:\n    count += 1; time.sleep(0.01)"
    await raises(TimeoutException, lambda: site.sandbox.run_code(endless, timeout=1.5))
    assert (await got(site.sandbox.run_code("count > 0"))).text == "True"


@case("code contexts")
async def contexts(site: Site) -> None:
    context = await got(site.sandbox.create_code_context(cwd="/tmp"))
    assert (context.language, context.cwd) == ("python", "/tmp")
    done = await got(site.sandbox.run_code("mine = 1; import os; os.getcwd()", context=context))
    assert done.text == "/tmp"
    assert context.id in [one.id for one in await got(site.sandbox.list_code_contexts())]
    await got(site.sandbox.restart_code_context(context))
    assert (await got(site.sandbox.run_code("mine", context=context))).error.name == "NameError"
    await got(site.sandbox.remove_code_context(context))
    await raises(NotFoundException, lambda: site.sandbox.run_code("1", context=context))


@case("run_code in a language without a kernel")
async def language(site: Site) -> None:
    error = await raises(SandboxException, lambda: site.sandbox.run_code("1", language="java"))
    assert "no kernel for 'java'" in str(error)
