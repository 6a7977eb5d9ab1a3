// The code interpreter.
import { assert, e2b, MINE, raises, site, test } from './cases.mjs'

const { NotFoundError, SandboxError, TimeoutError } = e2b
const run = (code, options) => site.sandbox.runCode(code, options)

test('run_code', async () => {
  const done = await run("import sys; kept = 40; print('out'); print('err', file=sys.stderr); kept + 2")
  assert.deepEqual([done.text, done.error], ['42', undefined])
  assert(done.executionCount)
  assert.deepEqual([done.logs.stdout, done.logs.stderr], [['out\n'], ['err\n']])
  assert.equal((await run('kept')).text, '40')
})

test('run_code: results, errors', async () => {
  const done = await run("from IPython.display import HTML, display; display(HTML('<b>b</b>')); {'a': 1}")
  const [shown, main] = done.results
  assert.deepEqual([shown.html, main.isMainResult, main.json], ['<b>b</b>', true, { a: 1 }])
  const failed = await run('1 / 0')
  assert.equal(failed.error.name, 'ZeroDivisionError')
  assert.match(failed.error.traceback, /1 \/ 0/)
})

test('run_code: callbacks', async () => {
  const seen = []
  await run("print('line'); 7\n", {
    onStdout: (line) => seen.push(line.line),
    onResult: (result) => seen.push(result.text),
    onError: (error) => seen.push(error),
  })
  assert.deepEqual(seen, ['line\n', '7'])
})

test("run_code: envs, the sandbox's own too", async () => {
  const code = "import os; [os.environ.get(name) for name in ('HERE', 'MINE')]"
  assert.deepEqual((await run(code, { envs: { HERE: 'ü' } })).results[0].json, ['ü', MINE])
  assert.deepEqual((await run(code)).results[0].json, [null, MINE])
})

test('run_code past its timeout', async () => {
  const endless = 'import time; count = 0\nwhile True:\n    count += 1; time.sleep(0.01)'
  await raises(TimeoutError, () => run(endless, { timeoutMs: 1500 }))
  assert.equal((await run('count > 0')).text, 'True')
})

test('code contexts', async () => {
  const context = await site.sandbox.createCodeContext({ cwd: '/tmp' })
  assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
  assert.equal((await run('mine = 1; import os; os.getcwd()', { context })).text, '/tmp')
  assert((await site.sandbox.listCodeContexts()).some((one) => one.id === context.id))
  await site.sandbox.restartCodeContext(context)
  assert.equal((await run('mine', { context })).error.name, 'NameError')
  await site.sandbox.removeCodeContext(context)
  await raises(NotFoundError, () => run('1', { context }))
})

test('run_code in a language without a kernel', async () => {
  const error = await raises(SandboxError, () => run('1', { language: 'java' }))
  assert.match(error.message, /400/) // the client shows no body of such an answer
})
