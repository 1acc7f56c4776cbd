/* A CUDA driver without a card, for what a frontend asks of one: libcuda.so.1 of two devices whose memory is
 * files. A handle names a file of /dev/shm; memory that is open is a mapping of it, at its device address.
 * As in the driver a call needs a context of its own thread, and an address is good while it is open. A copy
 * from memory lasts for as long as its file has another of that name with ".held" beside it. */
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { DEVICES = 2, MOST = 64 };

typedef struct { char name[64]; } Handle;
static struct { char *base, held[96]; size_t size; int device; } opened[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized, retained[DEVICES];
static _Thread_local int *current;

int cuInit(unsigned flags) { initialized = 1; return flags ? INVALID_VALUE : SUCCESS; }

int cuDeviceGetCount(int *count) { *count = DEVICES; return initialized ? SUCCESS : NOT_INITIALIZED; }

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

/* Of 40 KiB a test fills the share of a key. */
int cuDeviceTotalMem_v2(size_t *size, int device) {
  *size = 40 << 10;
  return device < 0 || device >= DEVICES ? INVALID_DEVICE : SUCCESS;
}

int cuDevicePrimaryCtxRetain(int **context, int device) {
  *context = &retained[device];
  return SUCCESS;
}

int cuCtxPushCurrent_v2(int *context) {
  if (current || context < retained || context >= retained + DEVICES) return INVALID_CONTEXT;
  current = context;
  return SUCCESS;
}

int cuCtxPopCurrent_v2(int **context) {
  if (!current) return INVALID_CONTEXT;
  *context = current;
  current = NULL;
  return SUCCESS;
}

int cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }

/* What is open around an address, or -1. */
static int at(unsigned long long address) {
  for (int number = 0; number < MOST; number++) {
    char *base = opened[number].base, *asked = (char *)address;
    if (base && asked >= base && asked < base + opened[number].size) return number;
  }
  return -1;
}

int cuIpcOpenMemHandle_v2(unsigned long long *address, Handle handle, unsigned flags) {
  if (!current) return INVALID_CONTEXT;
  char path[80] = "/dev/shm/";
  struct stat found;
  if (flags != 1 || !handle.name[0] || handle.name[63]) return INVALID_VALUE;
  int file = open(strcat(path, handle.name), O_RDWR | O_CLOEXEC);
  if (file < 0 || fstat(file, &found)) return INVALID_VALUE;
  char *base = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  int number = 0;
  while (opened[number].base) number++;
  opened[number].base = base;
  strcat(strcpy(opened[number].held, path), ".held");
  opened[number].size = found.st_size;
  opened[number].device = current - retained;
  pthread_mutex_unlock(&lock);
  *address = (unsigned long long)base;
  return SUCCESS;
}

int cuIpcCloseMemHandle(unsigned long long address) {
  int number = at(address);
  if (!current || number < 0 || opened[number].device != current - retained) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  munmap(opened[number].base, opened[number].size);
  opened[number].base = NULL;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address) {
  int number = at(address);
  if (!current || number < 0) return INVALID_VALUE;
  *base = (unsigned long long)opened[number].base;
  *size = opened[number].size;
  return SUCCESS;
}

static int within(unsigned long long address, size_t size) {
  int number = at(address);
  return current && number >= 0 && (char *)address + size <= opened[number].base + opened[number].size;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
  if (!within(from, size)) return INVALID_VALUE;
  while (!access(opened[at(from)].held, F_OK)) usleep(1000);
  memcpy(to, (void *)from, size);
  return SUCCESS;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) {
  if (!within(to, size)) return INVALID_VALUE;
  memcpy((void *)to, from, size);
  return SUCCESS;
}
