/* Memory set by the device, and kernels: functions of this process that a stream's thread calls,
 * with access to device memory while they run. The package `cupy` compiles a kernel's source with
 * the host's compiler and hands its launcher over by kvdFakeLaunch. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { SET_AT_ONCE = 1 << 20 };

/* -- memset -- */

struct fill {
    struct step step;
    CUdeviceptr to;
    size_t bytes;
    unsigned char value;
    unsigned char *pattern;
};

static void drop_fill(struct step *step) {
    free(((struct fill *)step)->pattern);
    free(step);
}

static CUresult run_fill(struct step *step, CUstream stream) {
    struct fill *fill = (struct fill *)step;
    (void)stream;
    for (size_t at = 0; at < fill->bytes; at += SET_AT_ONCE) {
        size_t part = fill->bytes - at < SET_AT_ONCE ? fill->bytes - at : SET_AT_ONCE;
        CUresult result = write_device(fill->to + at, fill->pattern, part);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

static CUresult fill_with(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream,
                          bool wait) {
    ENTER_CONTEXT();
    if (bytes == 0) return CUDA_SUCCESS;
    if (!is_device_address(to)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_device_side(to, bytes);
    if (result != CUDA_SUCCESS) return result;
    struct fill *fill = calloc(1, sizeof *fill);
    size_t most = bytes < SET_AT_ONCE ? bytes : SET_AT_ONCE;
    if (fill != NULL) fill->pattern = malloc(most);
    if (fill == NULL || fill->pattern == NULL) {
        free(fill);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(fill->pattern, value, most);
    fill->step = (struct step){.run = run_fill, .drop = drop_fill};
    fill->to = to;
    fill->bytes = bytes;
    count(MEMSETS, 1);
    return enqueue(stream, &fill->step, wait);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                CUstream stream) {
    return fill_with(to, value, bytes, stream, false);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    return fill_with(to, value, bytes, NULL, false); /* NVIDIA: asynchronous for the host */
}

/* -- kernels -- */

typedef void (*launcher)(const unsigned int *grid, const unsigned int *block, void **arguments);

struct launch {
    struct step step;
    launcher function;
    unsigned int grid[3], block[3];
    size_t number;
    void **arguments; /* one buffer: the pointers, then what they point to */
};

static pthread_mutex_t one_kernel = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local sigjmp_buf out_of_kernel;
static _Thread_local volatile sig_atomic_t in_kernel;
static struct sigaction before[2]; /* of SIGSEGV and SIGBUS */

/* A bad address in a kernel is the kernel's fault; anywhere else it goes where it went before. */
static void on_fault(int number, siginfo_t *how, void *context) {
    (void)how;
    (void)context;
    if (in_kernel) siglongjmp(out_of_kernel, 1);
    sigaction(number, &before[number == SIGBUS], NULL); /* and fault again */
}

static void catch_faults(void) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &ours, &before[0]);
    sigaction(SIGBUS, &ours, &before[1]);
}

static void stop_catching(void) {
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
}

static bool run_guarded(struct launch *launch) {
    if (sigsetjmp(out_of_kernel, 1) != 0) {
        in_kernel = 0;
        return false;
    }
    in_kernel = 1;
    launch->function(launch->grid, launch->block, launch->arguments);
    in_kernel = 0;
    return true;
}

static CUresult run_launch(struct step *step, CUstream stream) {
    (void)stream;
    pthread_mutex_lock(&one_kernel);
    pthread_rwlock_rdlock(&ranges_lock);
    let_kernels_reach(true);
    catch_faults();
    bool well = run_guarded((struct launch *)step);
    stop_catching();
    let_kernels_reach(false);
    pthread_rwlock_unlock(&ranges_lock);
    pthread_mutex_unlock(&one_kernel);
    if (!well) violation(KERNEL_FAULTS);
    return well ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static void drop_launch(struct step *step) {
    free(((struct launch *)step)->arguments);
    free(step);
}

/* Pointers to copies of the arguments, in one buffer. */
static void **hold_arguments(size_t number, void *const *values, const size_t *sizes) {
    size_t bytes = number * sizeof(void *) + 16;
    for (size_t i = 0; i < number; i++) bytes += (sizes[i] + 15) / 16 * 16;
    char *buffer = calloc(1, bytes + 16);
    if (buffer == NULL) return NULL;
    void **pointers = (void **)buffer;
    char *at = buffer + (number * sizeof(void *) + 15) / 16 * 16;
    for (size_t i = 0; i < number; i++) {
        pointers[i] = memcpy(at, values[i], sizes[i]);
        at += (sizes[i] + 15) / 16 * 16;
    }
    return pointers;
}

EXPORT CUresult kvdFakeLaunch(CUstream stream, launcher function, const unsigned int *shape,
                              size_t number, void *const *values, const size_t *sizes) {
    ENTER_CONTEXT();
    size_t threads = (size_t)shape[3] * shape[4] * shape[5];
    if (threads == 0 || threads > 1024 || (size_t)shape[0] * shape[1] * shape[2] == 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_fault();
    if (result != CUDA_SUCCESS) return result >= 700 ? fail_for_good(result) : result;
    struct launch *launch = calloc(1, sizeof *launch);
    if (launch == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    launch->arguments = hold_arguments(number, values, sizes);
    launch->step = (struct step){.run = run_launch, .drop = drop_launch};
    launch->function = function;
    memcpy(launch->grid, shape, sizeof launch->grid);
    memcpy(launch->block, shape + 3, sizeof launch->block);
    count(KERNELS, 1);
    return enqueue(stream, &launch->step, false);
}
