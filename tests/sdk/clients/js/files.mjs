// Files, watching, git.
import { assert, e2b, raises, site, test, until } from './cases.mjs'

const { FileNotFoundError, InvalidArgumentError } = e2b
const BYTES = Uint8Array.from({ length: 1 << 20 }, (_, index) => index % 256)
const files = () => site.sandbox.files
const same = (left, right) => assert(Buffer.compare(Buffer.from(left), Buffer.from(right)) === 0)

test('files.write, read', async () => {
  const written = await files().write('/tmp/sdk/a/text.txt', 'häl\0lo\n')
  assert.deepEqual([written.path, written.name], ['/tmp/sdk/a/text.txt', 'text.txt'])
  assert.equal(await files().read('/tmp/sdk/a/text.txt'), 'häl\0lo\n')
  await files().write('/tmp/sdk/empty', '')
  assert.equal(await files().read('/tmp/sdk/empty'), '')
  await files().write('relative', 'in the home')
  assert.equal(await files().read('/home/user/relative'), 'in the home')
  await raises(FileNotFoundError, () => files().read('/tmp/sdk/missing'))
  await raises(InvalidArgumentError, () => files().read('/tmp/sdk'))
})

test('files.write, read: bytes', async () => {
  await files().write('/tmp/sdk/bytes', BYTES.buffer)
  same(await files().read('/tmp/sdk/bytes', { format: 'bytes' }), BYTES)
  same(await (await files().read('/tmp/sdk/bytes', { format: 'blob' })).arrayBuffer(), BYTES)
})

test('files.write, read: streams', async () => {
  await files().write('/tmp/sdk/stream', new Blob([BYTES]).stream())
  const parts = []
  for await (const part of await files().read('/tmp/sdk/stream', { format: 'stream' })) parts.push(part)
  same(Buffer.concat(parts), BYTES)
})

test('files.write, read: gzip, metadata', async () => {
  const path = '/dev/shm/packed' // the disk of gVisor at level root has no attributes
  await files().write(path, 'text'.repeat(1000), { gzip: true, metadata: { origin: 'sdk' } })
  assert.equal(await files().read(path, { gzip: true }), 'text'.repeat(1000))
  assert.deepEqual((await files().getInfo(path)).metadata, { origin: 'sdk' })
})

test('files.write_files', async () => {
  const entries = [0, 1, 2].map((number) => ({ path: `/tmp/sdk/several/${number}`, data: String(number) }))
  const written = await files().writeFiles(entries)
  assert.deepEqual(
    written.map((one) => one.path),
    entries.map((one) => one.path),
  )
  assert.equal(await files().read('/tmp/sdk/several/2'), '2')
})

test('files.list', async () => {
  await site.sandbox.commands.run('ln -s several /tmp/sdk/link')
  const found = Object.fromEntries((await files().list('/tmp/sdk')).map((one) => [one.name, one]))
  assert.deepEqual([found.several.type, found.bytes.type, found.bytes.size], ['dir', 'file', BYTES.length])
  assert(found.link.symlinkTarget)
  const deep = (await files().list('/tmp/sdk', { depth: 2 })).map((one) => one.path)
  assert(deep.includes('/tmp/sdk/several/1'))
  await raises(FileNotFoundError, () => files().list('/tmp/sdk/missing'))
})

test('files.exists', async () => {
  assert.equal(await files().exists('/tmp/sdk/bytes'), true)
  assert.equal(await files().exists('/tmp/sdk/missing'), false)
})

test('files.get_info', async () => {
  const found = await files().getInfo('/tmp/sdk/bytes')
  assert.deepEqual(
    [found.name, found.path, found.size, found.owner, found.mode & 0o777],
    ['bytes', '/tmp/sdk/bytes', BYTES.length, 'user', 0o644],
  )
  await raises(FileNotFoundError, () => files().getInfo('/tmp/sdk/missing'))
})

test('files.make_dir', async () => {
  assert.equal(await files().makeDir('/tmp/sdk/new/dir'), true)
  assert.equal(await files().makeDir('/tmp/sdk/new/dir'), false)
})

test('files.rename', async () => {
  assert.equal((await files().rename('/tmp/sdk/bytes', '/tmp/sdk/new/moved')).path, '/tmp/sdk/new/moved')
  assert.equal(await files().exists('/tmp/sdk/bytes'), false)
  await raises(FileNotFoundError, () => files().rename('/tmp/sdk/bytes', '/tmp/sdk/other'))
})

test('files.remove', async () => {
  await files().remove('/tmp/sdk/new')
  assert.equal(await files().exists('/tmp/sdk/new/moved'), false)
})

async function watched(recursive, path) {
  await files().makeDir('/tmp/watched/deep')
  const seen = []
  const handle = await files().watchDir('/tmp/watched', (event) => void seen.push(event), { recursive })
  await files().write(`/tmp/watched/${path}`, 'text')
  const saw = (type) => seen.some((one) => one.name === path && one.type === type)
  await until(() => saw('write'))
  assert(saw('create'))
  await handle.stop()
  await files().remove('/tmp/watched')
}

test('files.watch_dir', async () => {
  await watched(false, 'new.txt')
  await raises(FileNotFoundError, () => files().watchDir('/tmp/missing', () => {}))
})

test('files.watch_dir, recursive', () => watched(true, 'deep/new.txt'))

test('git', async () => {
  const { git } = site.sandbox
  await git.init('/tmp/repo', { initialBranch: 'trunk' })
  await git.configureUser('One', 'one@example.invalid')
  await files().write('/tmp/repo/file', 'text')
  await git.add('/tmp/repo')
  await git.commit('/tmp/repo', "First: it's one")
  await git.createBranch('/tmp/repo', 'side')
  const status = await git.status('/tmp/repo')
  assert.deepEqual([status.currentBranch, status.fileStatus], ['side', []])
  assert.deepEqual((await git.branches('/tmp/repo')).branches.sort(), ['side', 'trunk'])
  await git.clone('/tmp/repo', { path: '/tmp/clone' })
  assert.equal(await files().read('/tmp/clone/file'), 'text')
})
