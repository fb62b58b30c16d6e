/* A libnvidia-ml.so that reads its cards from the file that FAKE_NVML names. It answers what Slurm's gpu/nvml plugin and
 * nvidia-ml-py ask of it when they detect GPUs; types, numbers and names are those of NVIDIA's NVML API reference.
 *
 *   gpu NAME|UUID|MINOR|BUSID|CPULIST|LANES   LANES: bus ids that NVLinks lead to, with commas; - for none
 *   mig GPU|NAME|UUID|GI|CI|SLICES|MIB        an instance of card number GPU
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 80
enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef struct device {
    struct device *parent; /* of a MIG instance */
    char name[96], uuid[96], bus[32], cpus[256];
    char *lanes[36];
    unsigned minor, lane_count, gi, ci, slices;
    unsigned long long mib;
} device;

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char text[32];
} pci_info;

typedef struct {
    unsigned multiprocessors, copy, decoder, encoder, jpeg, ofa, gi_slices, ci_slices;
    unsigned long long mib;
} attributes;

typedef struct {
    unsigned long long total, free, used;
} memory;

static device cards[MOST], instances[MOST];
static unsigned num_cards, num_instances;

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from ? from : ""); }

static int bus_id(device *card, pci_info *pci) {
    memset(pci, 0, sizeof *pci);
    sscanf(card->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    copy(pci->text, sizeof pci->text, card->bus);
    copy(pci->legacy, sizeof pci->legacy, card->bus + 4);
    return OK;
}

int nvmlInit_v2(void) {
    char line[2048];
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (file == NULL)
        return 9; /* DRIVER_NOT_LOADED */
    num_cards = num_instances = 0;
    while (fgets(line, sizeof line, file)) {
        char *at = line + 4, *field[7];
        line[strcspn(line, "\n")] = 0;
        for (int i = 0; i < 7; i++)
            field[i] = at ? strsep(&at, "|") : "";
        if (strncmp(line, "gpu ", 4) == 0) {
            device *card = &cards[num_cards++];
            memset(card, 0, sizeof *card);
            copy(card->name, sizeof card->name, field[0]);
            copy(card->uuid, sizeof card->uuid, field[1]);
            card->minor = atoi(field[2]);
            copy(card->bus, sizeof card->bus, field[3]);
            copy(card->cpus, sizeof card->cpus, field[4]);
            if (strcmp(field[5], "-") != 0)
                for (char *rest = strdup(field[5]), *lane; (lane = strsep(&rest, ","));)
                    card->lanes[card->lane_count++] = lane;
        } else {
            device *instance = &instances[num_instances++];
            memset(instance, 0, sizeof *instance);
            instance->parent = &cards[atoi(field[0])];
            copy(instance->name, sizeof instance->name, field[1]);
            copy(instance->uuid, sizeof instance->uuid, field[2]);
            instance->gi = atoi(field[3]);
            instance->ci = atoi(field[4]);
            instance->slices = atoi(field[5]);
            instance->mib = atoi(field[6]);
        }
    }
    fclose(file);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { return (void)flags, nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return copy(to, size, "580.159.04"), OK; }
int nvmlSystemGetNVMLVersion(char *to, unsigned size) { return copy(to, size, "13.580.159.04"), OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = num_cards, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device **card) { return *card = &cards[i], i < num_cards ? OK : NOT_FOUND; }
int nvmlDeviceGetName(device *card, char *to, unsigned size) { return copy(to, size, card->name), OK; }
int nvmlDeviceGetUUID(device *card, char *to, unsigned size) { return copy(to, size, card->uuid), OK; }
int nvmlDeviceGetMinorNumber(device *card, unsigned *minor) { return *minor = card->minor, OK; }
int nvmlDeviceGetPciInfo_v3(device *card, pci_info *pci) { return bus_id(card, pci); }
int nvmlDeviceGetMemoryInfo(device *card, memory *told) { return told->total = 80ULL << 30, (void)card, OK; }

int nvmlDeviceGetCpuAffinity(device *card, unsigned words, unsigned long *mask) {
    memset(mask, 0, words * sizeof *mask);
    for (char *rest = strdup(card->cpus), *part; (part = strsep(&rest, ","));) {
        unsigned first = strtoul(part, &part, 10), last = *part == '-' ? strtoul(part + 1, NULL, 10) : first;
        for (; first <= last; first++)
            if (first / 64 < words)
                mask[first / 64] |= 1UL << first % 64;
    }
    return OK;
}

int nvmlDeviceGetNvLinkState(device *card, unsigned lane, unsigned *active) {
    if (card->lane_count == 0)
        return NOT_SUPPORTED;
    if (lane >= card->lane_count)
        return INVALID_ARGUMENT;
    return *active = 1, OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device *card, unsigned lane, pci_info *pci) {
    device remote = {0};
    if (lane >= card->lane_count)
        return INVALID_ARGUMENT;
    copy(remote.bus, sizeof remote.bus, card->lanes[lane]);
    return bus_id(&remote, pci);
}

static int has_instances(device *card) {
    for (unsigned i = 0; i < num_instances; i++)
        if (instances[i].parent == card)
            return 1;
    return 0;
}

int nvmlDeviceGetMigMode(device *card, unsigned *current, unsigned *pending) {
    return *current = *pending = has_instances(card), OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device *card, unsigned *count) { return *count = 7, (void)card, OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *card, unsigned place, device **instance) {
    for (unsigned i = 0, at = 0; i < num_instances; i++)
        if (instances[i].parent == card && at++ == place)
            return *instance = &instances[i], OK;
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(device *instance, unsigned *id) { return *id = instance->gi, OK; }
int nvmlDeviceGetComputeInstanceId(device *instance, unsigned *id) { return *id = instance->ci, OK; }
int nvmlDeviceGetAttributes_v2(device *instance, attributes *told) {
    memset(told, 0, sizeof *told);
    told->gi_slices = told->ci_slices = instance->slices;
    return told->mib = instance->mib, OK;
}

int nvmlDeviceGetSupportedMemoryClocks(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetSupportedGraphicsClocks(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetApplicationsClock(void) { return NOT_SUPPORTED; }
int nvmlDeviceSetApplicationsClocks(void) { return NOT_SUPPORTED; }
int nvmlDeviceResetApplicationsClocks(void) { return NOT_SUPPORTED; }

/* What the plugin needs to be loaded, and asks only of running jobs. */
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, void *processes) { return (void)d, (void)count, (void)processes, NOT_SUPPORTED; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *count, void *processes) { return (void)d, (void)count, (void)processes, NOT_SUPPORTED; }
int nvmlDeviceGetProcessUtilization(device *d, void *samples, unsigned *count, unsigned long long since) { return (void)d, (void)samples, (void)count, (void)since, NOT_SUPPORTED; }
