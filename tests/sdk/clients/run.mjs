// All cases with the JavaScript client; their order is that of these imports.
import './js/sandbox.mjs'
import './js/commands.mjs'
import './js/files.mjs'
import './js/code.mjs'
import './js/life.mjs'
import { run } from './js/cases.mjs'

await run()
process.exit(0)
