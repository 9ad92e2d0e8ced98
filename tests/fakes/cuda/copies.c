/* Copies: plain, of rectangles, and in batches.
 *
 * Bytes go by pread and pwrite on the files of device memory, with the host's addresses as their
 * buffers: host memory that is gone is then an error of the kernel's, not the end of the process.
 * Copies within a batch have no order, so the fake runs them from the last to the first. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fake.h"

enum { MOST_AT_ONCE = 1 << 20 };

struct queued {
    struct step step;
    size_t count;
    struct rectangle *rectangles;
    unsigned char *early; /* what the sources held when the call was made, one after the other */
    bool any_order;
    CUresult injected;
};

/* -- moving bytes, under ranges_lock -- */

/* The descriptor and offset of `bytes` bytes at a device address; false where it is dead. */
static bool locate(uint64_t address, size_t bytes, int *fd, off_t *offset) {
    struct range *range = range_at(address);
    if (range == NULL || !range->accessible || address + bytes > range->base + range->bytes)
        return false;
    *fd = range->fd;
    *offset = (off_t)(address - range->base + range->offset);
    return true;
}

static bool move_whole(int fd, off_t offset, void *host, size_t bytes, bool to_device) {
    while (bytes > 0) {
        ssize_t n = to_device ? pwrite(fd, host, bytes, offset) : pread(fd, host, bytes, offset);
        if (n <= 0) return false;
        host = (char *)host + n;
        offset += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Read or write this process's host memory; false where there is none. */
static bool move_host(void *buffer, uint64_t address, size_t bytes, bool write) {
    struct iovec ours = {buffer, bytes}, theirs = {(void *)address, bytes};
    ssize_t n = write ? process_vm_writev(getpid(), &ours, 1, &theirs, 1, 0)
                      : process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0);
    return n == (ssize_t)bytes;
}

static CUresult lost(enum counter how) {
    violation(how);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* Between any address and a buffer of the fake's own. */
static CUresult move_buffer(unsigned char *buffer, uint64_t address, size_t bytes, bool write) {
    int fd;
    off_t offset;
    if (!is_device_address(address))
        return move_host(buffer, address, bytes, write) ? CUDA_SUCCESS : lost(HOST_MEMORY_GONE);
    if (!locate(address, bytes, &fd, &offset)) return lost(USE_AFTER_FREE);
    return move_whole(fd, offset, buffer, bytes, write) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult write_device(CUdeviceptr to, unsigned char *from, size_t bytes) {
    pthread_rwlock_rdlock(&ranges_lock);
    CUresult result = move_buffer(from, to, bytes, true);
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

static CUresult move_by_buffer(uint64_t to, uint64_t from, size_t bytes) {
    unsigned char *buffer = malloc(bytes);
    if (buffer == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = move_buffer(buffer, from, bytes, false);
    if (result == CUDA_SUCCESS) result = move_buffer(buffer, to, bytes, true);
    free(buffer);
    return result;
}

static CUresult move(uint64_t to, uint64_t from, size_t bytes) {
    bool to_device = is_device_address(to);
    if (to_device == is_device_address(from)) return move_by_buffer(to, from, bytes);
    int fd;
    off_t offset;
    uint64_t host = to_device ? from : to;
    if (!locate(to_device ? to : from, bytes, &fd, &offset)) return lost(USE_AFTER_FREE);
    if (!move_whole(fd, offset, (void *)host, bytes, to_device)) return lost(HOST_MEMORY_GONE);
    count(to_device ? BYTES_TO_DEVICE : BYTES_TO_HOST, (long long)bytes);
    return CUDA_SUCCESS;
}

/* -- a queued copy -- */

static CUresult run_stretch(CUstream stream, uint64_t to, uint64_t from, size_t bytes) {
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < bytes && result == CUDA_SUCCESS; at += MOST_AT_ONCE) {
        size_t part = bytes - at < MOST_AT_ONCE ? bytes - at : MOST_AT_ONCE;
        pace(stream, part);
        pthread_rwlock_rdlock(&ranges_lock);
        result = move(to + at, from + at, part);
        pthread_rwlock_unlock(&ranges_lock);
    }
    return result;
}

static CUresult run_rectangle(CUstream stream, const struct rectangle *of) {
    CUresult result = CUDA_SUCCESS;
    for (size_t row = 0; row < of->height && result == CUDA_SUCCESS; row++)
        result = run_stretch(stream, of->to + row * of->to_pitch, of->from + row * of->from_pitch,
                             of->width);
    return result;
}

/* Host memory that the copy was queued with as pinned must still be so. */
static bool still_pinned(const struct rectangle *of) {
    for (int side = 0; side < 2; side++) {
        uint64_t address = side ? of->to : of->from;
        size_t pitch = side ? of->to_pitch : of->from_pitch;
        size_t span = pitch * (of->height - 1) + of->width;
        if (!is_device_address(address) && how_pinned(address, span) != PINNED) return false;
    }
    return true;
}

static CUresult run_early(CUstream stream, struct queued *queued) {
    CUresult result = CUDA_SUCCESS;
    unsigned char *from = queued->early;
    for (size_t i = 0; i < queued->count && result == CUDA_SUCCESS; i++) {
        const struct rectangle *of = &queued->rectangles[i];
        pace(stream, of->width);
        pthread_rwlock_rdlock(&ranges_lock);
        result = move_buffer(from, of->to, of->width, true);
        pthread_rwlock_unlock(&ranges_lock);
        count(is_device_address(of->to) ? BYTES_TO_DEVICE : BYTES_TO_HOST, (long long)of->width);
        from += of->width;
    }
    return result;
}

static CUresult run_copies(struct step *step, CUstream stream) {
    struct queued *queued = (struct queued *)step;
    if (queued->injected != CUDA_SUCCESS) return queued->injected;
    if (queued->early != NULL) return run_early(stream, queued);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < queued->count && result == CUDA_SUCCESS; i++) {
        size_t which = queued->any_order ? queued->count - 1 - i : i;
        result = run_rectangle(stream, &queued->rectangles[which]);
    }
    return result;
}

static CUresult run_pinned_copies(struct step *step, CUstream stream) {
    struct queued *queued = (struct queued *)step;
    for (size_t i = 0; i < queued->count; i++)
        if (!still_pinned(&queued->rectangles[i])) return lost(UNREGISTERED_WHILE_QUEUED);
    return run_copies(step, stream);
}

static void drop_copies(struct step *step) {
    struct queued *queued = (struct queued *)step;
    free(queued->rectangles);
    free(queued->early);
    free(queued);
}

/* -- submitting -- */

/* What the driver knows of device memory before anything moves. */
CUresult check_device_side(CUdeviceptr address, size_t bytes) {
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *range = range_at(address);
    bool live = range != NULL && range->accessible;
    bool inside = live && address + bytes <= range->base + range->bytes;
    pthread_rwlock_unlock(&ranges_lock);
    if (!live) return fail_for_good(lost(USE_AFTER_FREE));
    if (!inside) violation(OUT_OF_BOUNDS);
    return inside ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult check_side(uint64_t address, size_t pitch, const struct rectangle *of,
                           bool *pageable) {
    size_t span = pitch * (of->height - 1) + of->width;
    if (is_device_address(address)) return check_device_side(address, span);
    enum pinned how = how_pinned(address, span);
    if (how == PARTLY_PINNED) violation(ACROSS_REGISTRATIONS);
    *pageable |= how == PAGEABLE;
    return how == PARTLY_PINNED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult check(const struct copies *copies, bool *pageable) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < copies->count && result == CUDA_SUCCESS; i++) {
        const struct rectangle *of = &copies->rectangles[i];
        if (of->width == 0 || of->height == 0) continue;
        result = check_side(of->to, of->to_pitch, of, pageable);
        if (result == CUDA_SUCCESS) result = check_side(of->from, of->from_pitch, of, pageable);
    }
    return result;
}

/* A batch's addresses go to the device as they are. */
static bool all_reached(const struct copies *copies) {
    for (size_t i = 0; i < copies->count; i++) {
        const struct rectangle *of = &copies->rectangles[i];
        if (!is_device_address(of->to) && !is_reached(of->to)) return false;
        if (!is_device_address(of->from) && !is_reached(of->from)) return false;
    }
    return true;
}

static CUresult read_early(struct queued *queued) {
    size_t bytes = 0;
    for (size_t i = 0; i < queued->count; i++) bytes += queued->rectangles[i].width;
    unsigned char *into = queued->early = malloc(bytes + 1);
    if (into == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    pthread_rwlock_rdlock(&ranges_lock);
    for (size_t i = 0; i < queued->count && result == CUDA_SUCCESS; i++) {
        result = move_buffer(into, queued->rectangles[i].from, queued->rectangles[i].width, false);
        into += queued->rectangles[i].width;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result == CUDA_SUCCESS ? result : fail_for_good(result);
}

static struct queued *queue_of(const struct copies *copies, bool pinned) {
    struct queued *queued = calloc(1, sizeof *queued);
    if (queued == NULL) return NULL;
    queued->rectangles = calloc(copies->count, sizeof *queued->rectangles);
    if (queued->rectangles == NULL) {
        free(queued);
        return NULL;
    }
    for (size_t i = 0; i < copies->count; i++) {
        const struct rectangle *of = &copies->rectangles[i];
        if (of->width != 0 && of->height != 0) queued->rectangles[queued->count++] = *of;
    }
    queued->any_order = copies->any_order;
    queued->step = (struct step){.run = pinned ? run_pinned_copies : run_copies, .drop = drop_copies};
    return queued;
}

static bool holds_for_good(CUresult code) {
    return code >= 700 || code == CUDA_ERROR_ECC_UNCORRECTABLE;
}

/* A call that waits gives pageable memory back once the driver has it, not once the device does. */
static bool lands_later(const struct copies *copies, bool pageable) {
    const struct rectangle *of = copies->rectangles;
    return copies->wait && pageable && copies->count == 1 && of->height == 1 &&
           is_device_address(of->to) && !is_device_address(of->from);
}

/* Check copies and queue them. Pageable host memory makes the call wait, as a driver's may. */
CUresult submit(CUstream stream, const struct copies *copies) {
    bool pageable = false;
    CUresult result = check_stream(stream);
    if (result == CUDA_SUCCESS) result = check(copies, &pageable);
    if (result != CUDA_SUCCESS) return result;
    CUresult injected = copy_fault();
    if (injected != CUDA_SUCCESS && !holds_for_good(injected)) return injected;
    count(copies->counted_as, 1);
    /* A call that waits anyway says nothing of whether its memory was forgotten. */
    if (pageable && !copies->wait) count(PAGEABLE_COPIES, 1);
    bool later = lands_later(copies, pageable);
    struct queued *queued = queue_of(copies, !pageable && !copies->sources_early);
    if (queued == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    queued->injected = injected;
    if (copies->any_order && !all_reached(copies)) queued->injected = lost(BAD_BATCHES);
    if (copies->sources_early || later) result = read_early(queued);
    bool wait = !later && (copies->wait || pageable);
    if (result == CUDA_SUCCESS) return enqueue(stream, &queued->step, wait);
    drop_copies(&queued->step);
    return result;
}

static CUresult copy(uint64_t to, uint64_t from, size_t bytes, CUstream stream, bool wait) {
    ENTER_CONTEXT();
    struct rectangle of = {.to = to, .from = from, .width = bytes, .height = 1};
    struct copies copies = {.count = 1,
                            .rectangles = &of,
                            .counted_as = wait ? COPIES_SYNC : COPIES_ASYNC,
                            .wait = wait};
    return submit(stream, &copies);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(to, from, bytes, stream, false);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy(to, from, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return copy(to, (uint64_t)from, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return copy((uint64_t)to, from, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy(to, from, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes,
                                     CUstream stream) {
    return copy(to, (uint64_t)from, bytes, stream, false);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy((uint64_t)to, from, bytes, stream, false);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                     CUstream stream) {
    return copy(to, from, bytes, stream, false);
}

/* -- rectangles -- */

static uint64_t corner(CUmemorytype type, const void *host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? (uint64_t)host : device;
}

static CUresult copy_rectangle(const CUDA_MEMCPY2D *given, CUstream stream, bool wait) {
    ENTER_CONTEXT();
    size_t width = given->WidthInBytes, height = given->Height;
    if ((given->srcPitch != 0 && given->srcPitch < width + given->srcXInBytes) ||
        (given->dstPitch != 0 && given->dstPitch < width + given->dstXInBytes) ||
        given->srcArray != NULL || given->dstArray != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct rectangle of = {.width = width, .height = height};
    of.from_pitch = given->srcPitch != 0 ? given->srcPitch : width;
    of.to_pitch = given->dstPitch != 0 ? given->dstPitch : width;
    of.from = corner(given->srcMemoryType, given->srcHost, given->srcDevice) +
              given->srcY * of.from_pitch + given->srcXInBytes;
    of.to = corner(given->dstMemoryType, given->dstHost, given->dstDevice) +
            given->dstY * of.to_pitch + given->dstXInBytes;
    struct copies copies = {.count = 1, .rectangles = &of, .counted_as = COPIES_2D, .wait = wait};
    return submit(stream, &copies);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *given, CUstream stream) {
    return copy_rectangle(given, stream, false);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *given) {
    return copy_rectangle(given, NULL, true);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *given) {
    return copy_rectangle(given, NULL, true);
}
