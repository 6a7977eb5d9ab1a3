// Cases of E2B's JavaScript client, under the names that the Python client's have; one JSON object a line tells how.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const require = createRequire(`${process.env.SDK_MODULES}/`)
export const e2b = require('e2b')
export const { Sandbox } = require('@e2b/code-interpreter')
export const { Template } = e2b
export { assert }

const WAIT_MS = 60_000
export const METADATA = { 'user name': 'zoë = 1&2', 'path/ü': 'a+b %20', plain: 'yes' }
export const NOBODY = `i${'0'.repeat(19)}`
export const MINE = `it's "so"`

/** What the cases share. */
export const site = { sandbox: undefined, unique: 'sdk-js', toKill: [], kept: {} }
const cases = []

export class Missing extends Error {}

/** Register one; they run in the order in which they are registered. */
export function test(name, run) {
  cases.push([name, run])
}

/** The call fails like that. */
export async function raises(kind, call) {
  try {
    await call()
  } catch (error) {
    assert(error instanceof kind, `${error?.constructor?.name}: ${error?.message} instead of ${kind.name}`)
    return error
  }
  assert.fail(`no ${kind.name}`)
}

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

/** What it gives once it gives something. */
export async function until(look) {
  const end = Date.now() + WAIT_MS
  for (;;) {
    const found = await look()
    if (found && (!Array.isArray(found) || found.length > 0)) return found
    assert(Date.now() < end, 'it did not come to be')
    await pause(50)
  }
}

/** All pages. */
export async function all(pages) {
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found
}

/** All cases, one after another; then nothing of them is left. */
export async function run() {
  const without = process.env.SDK_WITHOUT
  for (const [method, tried] of cases) {
    if (without && new RegExp(without).test(method)) continue
    const began = Date.now()
    let [ok, detail] = [true, '']
    try {
      await tried()
    } catch (error) {
      ok = error instanceof Missing ? null : false
      detail = String(error?.stack ?? error)
    }
    console.log(JSON.stringify({ method, ok, detail, seconds: (Date.now() - began) / 1000 }))
    if (method === 'Sandbox.create' && !ok) break
  }
  for (const sandbox of [...site.toKill, site.sandbox]) await sandbox?.kill().catch(() => {})
}
