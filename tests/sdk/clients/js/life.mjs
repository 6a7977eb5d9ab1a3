// What becomes of a sandbox: pause, resume, fork, snapshot, template, end.
import { writeFileSync } from 'node:fs'
import { all, assert, e2b, raises, Sandbox, site, Template, test } from './cases.mjs'

const { BuildError, NotFoundError, SandboxError } = e2b
const run = (code) => site.sandbox.runCode(code)
const state = async () => (await site.sandbox.getInfo()).state

test('sandbox.pause', async () => {
  await run("kept_over = 'yes'; import random; random.seed(1); random.random()")
  site.kept.process = await site.sandbox.commands.run('sleep 602', { background: true, timeoutMs: 0 })
  await site.sandbox.pause()
  assert.equal(await state(), 'paused')
  const found = await all(Sandbox.list({ query: { metadata: { run: site.unique }, state: ['paused'] } }))
  assert.deepEqual(
    found.map((one) => one.sandboxId),
    [site.sandbox.sandboxId],
  )
  await site.sandbox.pause() // once more changes nothing
})

test('sandbox.connect: resumes', async () => {
  await site.sandbox.connect({ timeoutMs: 600_000 })
  assert.equal(await state(), 'running')
  assert((await site.sandbox.commands.list()).some((one) => one.pid === site.kept.process.pid))
  assert.equal(await site.sandbox.files.read('/home/user/relative'), 'in the home')
  assert.equal(await site.sandbox.isRunning(), true)
})

test('run_code after a resume', async () => assert.equal((await run('kept_over')).text, 'yes'))

test('auto-resume by a request', async () => {
  await site.sandbox.pause()
  assert.equal((await site.sandbox.commands.run('echo awake')).stdout, 'awake\n')
  assert.equal(await state(), 'running')
})

test('sandbox.fork', async () => {
  const [child] = await site.sandbox.fork()
  assert(!(child instanceof Error), String(child))
  site.toKill.push(child)
  assert.notEqual(child.sandboxId, site.sandbox.sandboxId)
  const draw = '(kept_over, random.random())'
  const [theirs, mine] = [(await child.runCode(draw)).text, (await run(draw)).text]
  assert(theirs.startsWith("('yes', ") && theirs !== mine, `${theirs} ${mine}`)
  await child.files.write('/tmp/child', 'child')
  assert.equal(await site.sandbox.files.exists('/tmp/child'), false)
  assert.equal(await child.kill(), true)
})

test('sandbox.create_snapshot', async () => {
  site.snapshotId = (await site.sandbox.createSnapshot()).snapshotId
  assert(site.snapshotId)
  assert.equal((await site.sandbox.commands.run('echo on')).stdout, 'on\n')
})

test('list_snapshots', async () => {
  for (const pages of [Sandbox.listSnapshots(), site.sandbox.listSnapshots()])
    assert((await all(pages)).some((one) => one.snapshotId === site.snapshotId))
})

test('Sandbox.create of a snapshot', async () => {
  const other = await Sandbox.create(site.snapshotId, { timeoutMs: 300_000 })
  site.toKill.push(other)
  assert.equal(await other.files.read('/home/user/relative'), 'in the home')
  assert.equal((await other.runCode('kept_over')).text, 'yes')
  assert.equal(await other.kill(), true)
})

test('delete_snapshot', async () => {
  assert.equal(await Sandbox.deleteSnapshot(site.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(site.snapshotId), false)
  await raises(SandboxError, () => Sandbox.create(site.snapshotId))
})

test('Template.build', async () => {
  const context = process.env.SDK_CONTEXT
  writeFileSync(`${context}/copied.txt`, 'copied')
  const template = Template({ fileContextPath: context })
    .fromTemplate('base')
    .setEnvs({ BUILT: 'yes' })
    .runCmd('echo $BUILT >/home/user/ran')
    .copy('copied.txt', '/home/user/copied.txt')
  const entries = []
  site.build = await Template.build(template, site.unique, { onBuildLogs: (entry) => entries.push(entry.message) })
  assert(site.build.templateId && site.build.buildId && entries.length > 0)
})

test('Template.build that fails', async () => {
  const template = Template().fromTemplate('base').runCmd('echo why >&2; exit 3')
  const error = await raises(BuildError, () => Template.build(template, `${site.unique}-bad`))
  assert.match(error.message, /3/)
})

test('Template.get_build_status', async () => {
  const status = await Template.getBuildStatus(site.build)
  assert.deepEqual([status.status, status.buildID], ['ready', site.build.buildId])
})

test('Template.exists, alias_exists', async () => {
  assert.equal(await Template.exists(site.unique), true)
  assert.equal(await Template.aliasExists(site.unique), true)
  assert.equal(await Template.exists(`${site.unique}-none`), false)
})

const tags = async () => (await Template.getTags(site.unique)).map((one) => one.tag)

test('Template.assign_tags, get_tags, remove_tags', async () => {
  const made = await Template.assignTags(site.unique, ['stable', 'v1'])
  assert(made.buildId && made.tags.includes('stable') && made.tags.includes('v1'))
  const found = await tags()
  assert(found.includes('stable') && found.includes('v1'))
  await Template.removeTags(site.unique, ['v1'])
  assert(!(await tags()).includes('v1'))
})

test('Sandbox.create of a built template', async () => {
  const other = await Sandbox.create(`${site.unique}:stable`, { timeoutMs: 300_000 })
  site.toKill.push(other)
  assert.equal(await other.files.read('/home/user/copied.txt'), 'copied')
  assert.equal(await other.files.read('/home/user/ran'), 'yes\n')
  assert.equal(await other.kill(), true)
})

test('sandbox.kill', async () => {
  assert.equal(await site.sandbox.kill(), true)
  assert.equal(await site.sandbox.kill(), false)
  assert.equal(await Sandbox.kill(site.sandbox.sandboxId), false)
  assert.equal(await site.sandbox.isRunning(), false)
  await raises(NotFoundError, () => site.sandbox.getInfo())
})
