/* Devices, primary contexts, and whether this process may still use them.
 *
 * An error such as an illegal address holds for good: as with CUDA, every later call that needs a
 * context fails by it, until the process ends. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

pthread_mutex_t local_lock = PTHREAD_MUTEX_INITIALIZER;

static _Atomic int broken; /* the CUresult that holds for good, 0 while all is well */
static pid_t started_by;   /* a child by fork() can't use its parent's driver */
static struct CUctx_st contexts[MOST_DEVICES];
static _Thread_local CUcontext current;

static int visible[MOST_DEVICES]; /* the machine's numbers, by this process's */
static int visible_count;
static pthread_mutex_t visible_lock = PTHREAD_MUTEX_INITIALIZER;
static long long visible_of = -1; /* for how many devices of the machine that was worked out */

CUresult sticky_error(void) { return (CUresult)atomic_load(&broken); }
void forget_error(void) { atomic_store(&broken, 0); }

CUresult fail_for_good(CUresult code) {
    int well = 0;
    atomic_compare_exchange_strong(&broken, &well, (int)code);
    return sticky_error();
}

/* -- which devices this process sees -- */

void device_uuid(int machine, CUuuid *uuid) {
    static const unsigned char REST[12] = {0x6b, 0x76, 0x64, 0x00, 0xfa, 0x6b};
    for (int i = 0; i < 4; i++) uuid->bytes[i] = (char)(machine >> (24 - 8 * i));
    memcpy(uuid->bytes + 4, REST, sizeof REST);
}

static void uuid_text(int machine, char text[48]) {
    CUuuid uuid;
    device_uuid(machine, &uuid);
    char *at = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) *at++ = '-';
        at += sprintf(at, "%02x", (unsigned char)uuid.bytes[i]);
    }
}

/* The machine's number of a device as CUDA_VISIBLE_DEVICES names it; -1 for one that is none. */
static int named_device(const char *name) {
    if (strncmp(name, "GPU-", 4) == 0) {
        for (int machine = 0; machine < visible_of; machine++) {
            char text[48];
            uuid_text(machine, text);
            if (strlen(name) > 4 && strncasecmp(text, name, strlen(name)) == 0) return machine;
        }
        return -1;
    }
    char *end;
    long number = strtol(name, &end, 10);
    return end != name && *end == 0 && number >= 0 && number < visible_of ? (int)number : -1;
}

static void find_visible(void) {
    if (visible_of == setting(DEVICES_COUNT)) return;
    visible_of = setting(DEVICES_COUNT);
    visible_count = 0;
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    if (given == NULL) {
        for (int machine = 0; machine < visible_of && machine < MOST_DEVICES; machine++)
            visible[visible_count++] = machine;
        return;
    }
    char names[1024], *rest = names;
    snprintf(names, sizeof names, "%s", given);
    for (char *name = strsep(&rest, ","); name != NULL; name = strsep(&rest, ",")) {
        int machine = named_device(name);
        if (machine < 0 || visible_count == MOST_DEVICES) return; /* what follows is not seen */
        visible[visible_count++] = machine;
    }
}

int machine_device(CUdevice device) { return visible[device]; }

CUresult check_device(CUdevice device) {
    ENTER();
    return device < 0 || device >= visible_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

/* -- entering a call -- */

CUresult enter(void) {
    if (!state_attached() || started_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&visible_lock);
    find_visible();
    pthread_mutex_unlock(&visible_lock);
    return CUDA_SUCCESS;
}

CUresult enter_context(void) {
    ENTER();
    if (sticky_error() != CUDA_SUCCESS) return sticky_error();
    return current == NULL || current->references == 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUcontext current_context(void) { return current; }

EXPORT CUresult cuInit(unsigned int flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&local_lock);
    state_attach();
    if (started_by == 0) started_by = getpid();
    pthread_mutex_unlock(&local_lock);
    if (!state_attached() || state_me() < 0) return CUDA_ERROR_NO_DEVICE;
    ENTER();
    return visible_count == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (version == NULL) return CUDA_ERROR_INVALID_VALUE;
    state_attach();
    *version = state_attached() ? (int)setting(DRIVER_VERSION) : 0;
    return CUDA_SUCCESS;
}

/* -- devices -- */

EXPORT CUresult cuDeviceGetCount(int *found) {
    ENTER();
    *found = visible_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    if (ordinal < 0 || ordinal >= visible_count) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) snprintf(name, (size_t)length, "Fake GPU %d", visible[device]);
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) device_uuid(visible[device], uuid);
    return result;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) *bytes = (size_t)setting(DEVICE_BYTES);
    return result;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    char place[24];
    int taken = snprintf(place, sizeof place, "%04X:%02X:00.0", (unsigned)setting(PCI_DOMAIN),
                         0x10u + (unsigned)visible[device]);
    if (length <= taken) return CUDA_ERROR_INVALID_VALUE;
    memcpy(text, place, (size_t)taken + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    ENTER();
    unsigned domain, bus, slot, function;
    if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdevice i = 0; i < visible_count; i++) {
        if (bus != 0x10u + (unsigned)visible[i]) continue;
        *device = i;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

static int attribute_of(CUdevice device, CUdevice_attribute attribute) {
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 16;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: return (int)setting(COMPUTE_MODE);
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + visible[device];
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: return (int)setting(MPS_ON);
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        return (int)setting(HOST_POINTER_USABLE);
    case CU_DEVICE_ATTRIBUTE_NUMA_ID:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return -1;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return 1;
    default: return 0;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    if ((int)attribute <= 0 || (int)attribute > 200) return CUDA_ERROR_INVALID_VALUE;
    *value = attribute_of(device, attribute);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) result = check_device(peer);
    if (result == CUDA_SUCCESS) *can = device != peer;
    return result;
}

/* -- primary contexts -- */

/* NVIDIA's driver maps a memory file of its own, too, for as long as the process lives: what looks
 * for leaks has to know whose it is. With local_lock. */
static void map_own_file(void) {
    static bool mapped;
    if (mapped) return;
    mapped = true;
    int fd = memfd_create("/.nvidia_drv.XXXXXX", MFD_CLOEXEC);
    if (fd < 0) return;
    if (ftruncate(fd, 4096) == 0) mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&local_lock);
    CUcontext found = &contexts[device];
    if (found->references == 0) result = take_context(visible[device]);
    if (result == CUDA_SUCCESS) {
        found->device = device;
        found->references++;
        *context = found;
        map_own_file();
    }
    pthread_mutex_unlock(&local_lock);
    return result;
}

/* The last release destroys the context, and with it all that it holds. */
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&local_lock);
    CUcontext found = &contexts[device];
    bool last = found->references == 1;
    if (found->references == 0) result = CUDA_ERROR_INVALID_CONTEXT;
    if (found->references > 0) found->references--;
    pthread_mutex_unlock(&local_lock);
    if (!last) return result;
    end_streams_of(device);
    found->null_stream = NULL;
    remove_ranges_of(device);
    drop_context(visible[device]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    *flags = 0;
    *active = contexts[device].references > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    if (context != NULL && (context < contexts || context >= contexts + MOST_DEVICES))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context != NULL && context->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER_CONTEXT();
    *device = current->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER_CONTEXT();
    drain_streams();
    return sticky_error();
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT();
    uint64_t is_free, in_all;
    device_memory(visible[current->device], &is_free, &in_all);
    *free_bytes = is_free;
    *total = in_all;
    return CUDA_SUCCESS;
}
