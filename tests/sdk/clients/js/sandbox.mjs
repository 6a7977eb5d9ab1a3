// Sandboxes: made, found, described, reached.
import { all, assert, e2b, METADATA, MINE, NOBODY, raises, Sandbox, site, test, until } from './cases.mjs'

const { AuthenticationError, NotFoundError, SandboxError } = e2b
const MINUTE = 60_000

test('Sandbox.create', async () => {
  site.sandbox = await Sandbox.create({
    timeoutMs: 10 * MINUTE,
    metadata: { ...METADATA, run: site.unique },
    envs: { MINE },
    network: { allowPublicTraffic: false },
    lifecycle: { onTimeout: 'pause', autoResume: true },
  })
  assert(site.sandbox.sandboxId && site.sandbox.trafficAccessToken)
})

test('Sandbox.create of no template', async () => {
  const error = await raises(SandboxError, () => Sandbox.create('no-such-template'))
  assert.match(error.message, /404/)
})

test('Sandbox.create with a wrong key', () =>
  raises(AuthenticationError, () => Sandbox.create({ apiKey: `e2b_${'0'.repeat(64)}` })))

test('sandbox.get_info', async () => {
  const info = await site.sandbox.getInfo()
  assert.equal(info.sandboxId, site.sandbox.sandboxId)
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, { ...METADATA, run: site.unique })
  assert.deepEqual([info.cpuCount, info.memoryMB], [1, 512])
  assert(Math.abs(info.startedAt - Date.now()) < 5 * MINUTE)
  assert(info.endAt - Date.now() > 5 * MINUTE && info.endAt - Date.now() < 11 * MINUTE)
  assert.equal((await Sandbox.getInfo(site.sandbox.sandboxId)).sandboxId, info.sandboxId)
  await raises(NotFoundError, () => Sandbox.getInfo(NOBODY))
})

test('Sandbox.connect', async () => {
  const other = await Sandbox.connect(site.sandbox.sandboxId)
  assert.equal((await other.commands.run('echo $MINE')).stdout, `${MINE}\n`)
  assert.equal(other.trafficAccessToken, site.sandbox.trafficAccessToken)
  await raises(NotFoundError, () => Sandbox.connect(NOBODY))
})

test('sandbox.connect', async () => {
  const again = await site.sandbox.connect({ timeoutMs: 15 * MINUTE })
  assert.equal(again.sandboxId, site.sandbox.sandboxId)
})

const listed = async (options) => (await all(Sandbox.list(options))).map((one) => one.sandboxId)

test('Sandbox.list', async () => assert((await listed()).includes(site.sandbox.sandboxId)))

test('Sandbox.list by metadata', async () => {
  const metadata = { ...METADATA, run: site.unique }
  assert.deepEqual(await listed({ query: { metadata } }), [site.sandbox.sandboxId])
  assert.deepEqual(await listed({ query: { metadata: { ...metadata, plain: 'no' } } }), [])
})

test('Sandbox.list by state', async () => {
  const metadata = { run: site.unique }
  assert.deepEqual(await listed({ query: { metadata, state: ['running'] } }), [site.sandbox.sandboxId])
  assert.deepEqual(await listed({ query: { metadata, state: ['paused'] } }), [])
})

test('Sandbox.list in pages', async () => {
  assert.equal((await Sandbox.list({ limit: 1, query: { metadata: { run: site.unique } } }).nextItems()).length, 1)
  const every = await listed({ limit: 1 })
  assert(every.includes(site.sandbox.sandboxId) && new Set(every).size === every.length)
})

test('sandbox.set_timeout', async () => {
  await site.sandbox.setTimeout(20 * MINUTE)
  assert((await site.sandbox.getInfo()).endAt - Date.now() > 15 * MINUTE)
  await site.sandbox.setTimeout(10 * MINUTE)
  assert((await site.sandbox.getInfo()).endAt - Date.now() < 11 * MINUTE)
  await raises(NotFoundError, () => Sandbox.setTimeout(NOBODY, MINUTE))
})

test('sandbox.is_running', async () => assert.equal(await site.sandbox.isRunning(), true))

test('sandbox.get_metrics', async () => {
  const [last] = await until(() => site.sandbox.getMetrics())
  assert.equal(last.cpuCount, 1)
  assert(last.memUsed > 0 && last.memUsed <= last.memTotal && last.diskUsed > 0 && last.diskUsed <= last.diskTotal)
})

test('sandbox.update_network', async () => {
  await site.sandbox.updateNetwork({ allowInternetAccess: false })
  assert.equal((await site.sandbox.getInfo()).allowInternetAccess, false)
  await site.sandbox.updateNetwork({})
})

test('sandbox.get_host', async () => {
  const serve = 'mkdir -p /tmp/www && echo served >/tmp/www/page && exec python3 -m http.server 8080 -d /tmp/www'
  await site.sandbox.commands.run(serve, { background: true, timeoutMs: 0 })
  const host = site.sandbox.getHost(8080)
  assert(host.startsWith(`8080-${site.sandbox.sandboxId}.`))
  const headers = { 'e2b-traffic-access-token': site.sandbox.trafficAccessToken }
  const up = async () => {
    const answer = await fetch(`https://${host}/page`, { headers })
    return answer.status !== 502 && answer
  }
  const answer = await until(up)
  assert.deepEqual([answer.status, await answer.text()], [200, 'served\n'])
  assert.equal((await fetch(`https://${host}/page`)).status, 403)
  const closed = await fetch(`https://${site.sandbox.getHost(8081)}/`, { headers })
  assert.equal(closed.status, 502)
  assert.match((await closed.json()).message, /not open/)
})

test('sandbox.upload_url, download_url', async () => {
  const path = '/home/user/by url.txt'
  const form = new FormData()
  form.append('file', new Blob(['signed']), 'by url.txt')
  const sent = await fetch(await site.sandbox.uploadUrl(path, { useSignatureExpiration: 60 }), {
    method: 'POST',
    body: form,
  })
  assert.equal(sent.status, 200, await sent.text())
  assert.equal(await site.sandbox.files.read(path), 'signed')
  const url = await site.sandbox.downloadUrl(path, { useSignatureExpiration: 60 })
  assert.equal(await (await fetch(url)).text(), 'signed')
  assert.equal((await fetch(url.replace(/by(%20|\+)url/, 'other'))).status, 401)
  const late = await site.sandbox.downloadUrl(path, { useSignatureExpiration: -60 })
  assert.equal((await fetch(late)).status, 401)
})

test('sandbox_url: one URL for all, by headers', async () => {
  const other = await Sandbox.connect(site.sandbox.sandboxId, { sandboxUrl: process.env.E2B_API_URL })
  assert.equal((await other.commands.run('echo $MINE')).stdout, `${MINE}\n`)
  await other.files.write('/tmp/shared', 'text')
  assert.equal(await other.files.read('/tmp/shared'), 'text')
  assert.equal(await other.isRunning(), true)
})
