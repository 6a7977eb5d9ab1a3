/* Preloaded into QEMU: guest RAM out of a base file and the layers of pages above it.
 *
 * QEMU is told a memory path that exists nowhere (AENV_RAM_PATH), so that without this library it does not start.
 * Here that path opens the base file, read-only whatever QEMU asks for: nothing in QEMU can change it. When QEMU
 * maps the base, each piece of a layer is mapped over it, private and copy on write. And when QEMU punches a hole
 * for memory that the guest gave back, nothing happens to the file: QEMU's own madvise then drops the private copy
 * of the page, which is all that the guest owned of it.
 *
 * The plan is in the inherited descriptor that AENV_RAM_PLAN names, written by aenv_run/drivers/qemu_ram.py: words
 * of 64 bits in host order. magic, bytes of RAM, base descriptor, number of files, number of pieces; a descriptor
 * for each file; for each piece its RAM offset, length, index of the file, offset in the file. All descriptors are
 * closed once they are mapped. Whatever is not as expected ends the process with a message.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AENV_RAM_PATH "/dev/null/aenv-ram"
#define MAGIC 0x314e414c504d4152u /* "RAMPLAN1" */
#define MAX_FILES 64u
#define MAX_PIECES 65536u
#define EXIT_UNUSABLE 70

enum { HEADER_MAGIC, HEADER_RAM, HEADER_BASE, HEADER_FILES, HEADER_PIECES, HEADER_WORDS };
enum { PIECE_OFFSET, PIECE_LENGTH, PIECE_FILE, PIECE_FILE_OFFSET, PIECE_WORDS };

static struct stat base; /* st_ino is 0 until QEMU has opened it */
static int is_mapped;

static void fail(const char *what)
{
    dprintf(STDERR_FILENO, "aenv-ram: %s (%s)\n", what, errno ? strerror(errno) : "not as planned");
    _exit(EXIT_UNUSABLE);
}

static int plan_descriptor(void)
{
    const char *text = getenv("AENV_RAM_PLAN");

    errno = 0;
    if (text == NULL)
        fail("AENV_RAM_PLAN is not set");
    return atoi(text);
}

static void read_plan(void *target, size_t bytes, size_t offset)
{
    errno = 0;
    if (pread(plan_descriptor(), target, bytes, (off_t)offset) != (ssize_t)bytes)
        fail("the plan cannot be read");
}

static void read_header(uint64_t header[HEADER_WORDS])
{
    read_plan(header, HEADER_WORDS * sizeof *header, 0);
    if (header[HEADER_MAGIC] != MAGIC || header[HEADER_FILES] > MAX_FILES || header[HEADER_PIECES] > MAX_PIECES)
        fail("this is no plan");
}

static int open_base(void)
{
    uint64_t header[HEADER_WORDS];
    int descriptor;

    read_header(header);
    descriptor = fcntl((int)header[HEADER_BASE], F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0 || fstat(descriptor, &base) != 0)
        fail("the base file cannot be opened");
    if ((uint64_t)base.st_size != header[HEADER_RAM])
        fail("the base file has not the size of the RAM");
    return descriptor;
}

static int is_base(int descriptor)
{
    struct stat found;

    return base.st_ino != 0 && descriptor >= 0 && fstat(descriptor, &found) == 0 && found.st_dev == base.st_dev &&
           found.st_ino == base.st_ino;
}

static void *map_file(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    return (void *)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
}

static void map_piece(char *ram, const uint64_t *header, const uint64_t *files, const uint64_t *piece, int protection)
{
    uint64_t offset = piece[PIECE_OFFSET], length = piece[PIECE_LENGTH], at = piece[PIECE_FILE_OFFSET];
    uint64_t unaligned = (offset | length | at) & ((uint64_t)sysconf(_SC_PAGESIZE) - 1);
    struct stat found;
    int descriptor;

    errno = 0;
    if (unaligned || length == 0 || offset > header[HEADER_RAM] || length > header[HEADER_RAM] - offset ||
        piece[PIECE_FILE] >= header[HEADER_FILES])
        fail("a piece of the plan is out of bounds");
    descriptor = (int)files[piece[PIECE_FILE]];
    if (fstat(descriptor, &found) != 0 || at > (uint64_t)found.st_size || length > (uint64_t)found.st_size - at)
        fail("a layer is shorter than planned");
    if (map_file(ram + offset, length, protection, MAP_PRIVATE | MAP_FIXED, descriptor, (off_t)at) == MAP_FAILED)
        fail("a layer cannot be mapped");
}

static void map_layers(char *ram, int protection)
{
    uint64_t header[HEADER_WORDS], files[MAX_FILES], *pieces, index;
    size_t files_bytes, pieces_bytes;

    read_header(header);
    files_bytes = header[HEADER_FILES] * sizeof *files;
    pieces_bytes = header[HEADER_PIECES] * PIECE_WORDS * sizeof *pieces;
    pieces = malloc(pieces_bytes + 1);
    if (pieces == NULL)
        fail("no memory for the plan");
    read_plan(files, files_bytes, sizeof header);
    read_plan(pieces, pieces_bytes, sizeof header + files_bytes);
    for (index = 0; index < header[HEADER_PIECES]; index++)
        map_piece(ram, header, files, pieces + index * PIECE_WORDS, protection);
    free(pieces);
    for (index = 0; index < header[HEADER_FILES]; index++)
        close((int)files[index]);
    close((int)header[HEADER_BASE]);
    close(plan_descriptor());
    is_mapped = 1;
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    void *mapped = map_file(address, length, protection, flags, descriptor, offset);

    if (mapped == MAP_FAILED || !is_base(descriptor))
        return mapped;
    errno = 0;
    if (is_mapped || (flags & MAP_TYPE) != MAP_PRIVATE || offset != 0 || length != (size_t)base.st_size)
        fail("the RAM is mapped in a way that is not known");
    map_layers(mapped, protection);
    return mapped;
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    return mmap64(address, length, protection, flags, descriptor, offset);
}

static int open_file(const char *path, int flags, mode_t mode)
{
    if (strcmp(path, AENV_RAM_PATH) == 0)
        return open_base();
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    mode_t mode = 0;

    if (flags & (O_CREAT | __O_TMPFILE)) {
        va_list rest;

        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return open_file(path, flags, mode);
}

int __open64_2(const char *path, int flags);
int __open64_2(const char *path, int flags)
{
    return open_file(path, flags, 0);
}

int fallocate64(int descriptor, int mode, off_t offset, off_t length)
{
    if ((mode & FALLOC_FL_PUNCH_HOLE) && is_base(descriptor))
        return 0;
    return (int)syscall(SYS_fallocate, descriptor, mode, offset, length);
}

int fallocate(int descriptor, int mode, off_t offset, off_t length)
{
    return fallocate64(descriptor, mode, offset, length);
}
