// Commands and terminals.
import { assert, e2b, Missing, raises, site, test, until } from './cases.mjs'

const { CommandExitError, InvalidArgumentError, TimeoutError } = e2b
const commands = () => site.sandbox.commands
const background = (shell, options) => commands().run(shell, { background: true, ...options })

test('commands.run', async () => {
  const done = await commands().run('echo out; echo err >&2; pwd')
  assert.deepEqual([done.exitCode, done.stdout, done.stderr], [0, 'out\n/home/user\n', 'err\n'])
  const error = await raises(CommandExitError, () => commands().run('echo bad >&2; exit 3'))
  assert.deepEqual([error.exitCode, error.stderr], [3, 'bad\n'])
})

test('commands.run with envs, cwd, user', async () => {
  const shell = 'id -un; pwd; echo $HERE $FROM_IMAGE'
  const done = await commands().run(shell, { envs: { HERE: 'ü' }, cwd: '/tmp', user: 'root' })
  assert.equal(done.stdout, 'root\n/tmp\nü yes\n')
  assert.equal((await commands().run('id -un')).stdout, 'user\n')
  await raises(InvalidArgumentError, () => commands().run('true', { cwd: '/no/such' }))
})

test('commands.run streams', async () => {
  let [out, err] = ['', '']
  await commands().run('echo one; echo two >&2; echo thrée', {
    onStdout: (text) => void (out += text),
    onStderr: (text) => void (err += text),
  })
  assert.deepEqual([out, err], ['one\nthrée\n', 'two\n'])
})

test('commands.run past its timeout', async () => {
  await raises(TimeoutError, () => commands().run('sleep 600', { timeoutMs: 1000 }))
  await until(async () => !(await commands().list()).some((one) => one.args.includes('sleep 600')))
})

test('commands.run in the background, wait', async () => {
  const handle = await background('sleep 0.2; echo later; exit 4')
  assert(handle.pid > 0)
  const error = await raises(CommandExitError, () => handle.wait())
  assert.deepEqual([error.exitCode, error.stdout], [4, 'later\n'])
})

test('commands.list', async () => {
  site.kept.sleeper = await background('sleep 601', { envs: { A: 'b' }, cwd: '/tmp' })
  const mine = (await commands().list()).find((one) => one.pid === site.kept.sleeper.pid)
  assert.deepEqual([mine.cmd, mine.args, mine.envs.A, mine.cwd], ['/bin/bash', ['-l', '-c', 'sleep 601'], 'b', '/tmp'])
})

test('commands.kill', async () => {
  const handle = site.kept.sleeper
  assert.equal(await commands().kill(handle.pid), true)
  await raises(CommandExitError, () => handle.wait())
  assert.equal(await commands().kill(handle.pid), false)
})

test('commands.connect, disconnect', async () => {
  const handle = await background('read line; echo got $line', { stdin: true })
  await handle.disconnect()
  const again = await commands().connect(handle.pid)
  await commands().sendStdin(handle.pid, 'hällo\n')
  assert.equal((await again.wait()).stdout, 'got hällo\n')
})

test('commands.send_stdin', async () => {
  const handle = await background('read a; read b; echo $b $a', { stdin: true })
  await commands().sendStdin(handle.pid, 'one\n')
  await commands().sendStdin(handle.pid, 'two\n')
  assert.equal((await handle.wait()).stdout, 'two one\n')
})

test('commands.close_stdin', async () => {
  const handle = await background('cat; echo ended', { stdin: true })
  await commands().sendStdin(handle.pid, 'all\n')
  await commands().closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'all\nended\n')
})

test('commands.stream_input', async () => {
  throw new Missing('streamInput')
})

/** A terminal, and what it showed. */
async function terminal(make) {
  const decoder = new TextDecoder()
  const made = { shown: '' }
  made.handle = await make((data) => void (made.shown += decoder.decode(data, { stream: true })))
  made.type = (text) => site.sandbox.pty.sendInput(made.handle.pid, new TextEncoder().encode(text))
  return made
}

const create = () => terminal((onData) => site.sandbox.pty.create({ rows: 24, cols: 80, cwd: '/tmp', onData }))

test('pty.create, send_stdin, resize', async () => {
  const made = await create()
  await site.sandbox.pty.resize(made.handle.pid, { rows: 33, cols: 99 })
  await made.type('stty size; pwd; echo $TERM; exit\n')
  await made.handle.wait()
  for (const part of ['33 99', '/tmp', 'xterm-256color']) assert(made.shown.includes(part), made.shown)
})

test('pty.connect', async () => {
  const first = await create()
  await first.handle.disconnect()
  const second = await terminal((onData) => site.sandbox.pty.connect(first.handle.pid, { onData }))
  await second.type('echo $((6 * 7)); exit\n')
  await second.handle.wait()
  assert(second.shown.includes('42'), second.shown)
})

test('pty.kill', async () => {
  const made = await create()
  assert.equal(await site.sandbox.pty.kill(made.handle.pid), true)
  await raises(CommandExitError, () => made.handle.wait())
  assert.equal(await site.sandbox.pty.kill(made.handle.pid), false)
})
