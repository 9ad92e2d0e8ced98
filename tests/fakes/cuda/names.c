/* Names: of errors, and of functions as of a version of CUDA. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "fake.h"

static const struct {
    CUresult code;
    const char *name, *text;
} ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int place_of(CUresult code) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) return (int)i;
    return -1;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    int place = place_of(code);
    *name = place < 0 ? NULL : ERRORS[place].name;
    return place < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    int place = place_of(code);
    *text = place < 0 ? NULL : ERRORS[place].text;
    return place < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* What changed its signature: from which version on a name means which exported function. A driver
 * that is asked for a newer version than it knows answers with the newest that it has, so a caller
 * who wants the newer signature has to ask for the driver's version first. */
static const struct {
    const char *name;
    int since;
    const char *exported;
} VERSIONS[] = {
    {"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    {"cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync"},
};

/* NULL for a name that has one signature only; "" where the version is too old for it. */
static const char *exported_name(const char *name, int version) {
    bool known = false;
    for (size_t i = 0; i < sizeof VERSIONS / sizeof *VERSIONS; i++) {
        if (strcmp(VERSIONS[i].name, name) != 0) continue;
        known = true;
        if (version >= VERSIONS[i].since && setting(DRIVER_VERSION) >= VERSIONS[i].since)
            return VERSIONS[i].exported;
    }
    return known ? "" : NULL;
}

static void *own_symbol(const char *name) {
    Dl_info ours, theirs;
    void *found = dlsym(RTLD_DEFAULT, name);
    bool here = found != NULL && dladdr((void *)own_symbol, &ours) && dladdr(found, &theirs) &&
                ours.dli_fbase == theirs.dli_fbase;
    return here ? found : NULL;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                                    cuuint64_t flags, CUdriverProcAddressQueryResult *how) {
    if (name == NULL || function == NULL || flags > 2) return CUDA_ERROR_INVALID_VALUE;
    state_attach();
    if (!state_attached()) return CUDA_ERROR_NOT_INITIALIZED;
    const char *exported = exported_name(name, version);
    char second[128];
    snprintf(second, sizeof second, "%s_v2", name);
    void *found = exported != NULL ? own_symbol(exported) : own_symbol(second);
    if (found == NULL && exported == NULL) found = own_symbol(name);
    *function = found;
    if (how != NULL)
        *how = found != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
               : exported != NULL ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
