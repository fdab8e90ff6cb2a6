//! CPUID of the guest: the features that KVM supports, with the machine's own topology.
//!
//! The machine has one package. Each CPU is a core of one thread, and its index is its APIC id and
//! x2APIC id. Hidden is what the machine does not have or a snapshot can't take along: performance
//! counters, virtualization of the guest's own, enclaves, transactions, tracing, branch records in
//! memory, encrypted memory, and tiles, whose state is larger than what is saved. With a [`Template`] the
//! rest is not the host's either.
//! Sources: Intel SDM 2A, CPUID; AMD APM 3, appendix E; Linux, Documentation/virt/kvm/api.rst.
mod template;

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

pub use template::Template;
pub(crate) use template::is_of_host;

/// Reason why there is no CPUID for a guest.
#[derive(Debug, Error)]
pub enum CpuidError {
    /// KVM did not report the CPUID it supports.
    #[error("asking KVM for its CPUID (KVM_GET_SUPPORTED_CPUID): {0}")]
    Supported(kvm_ioctls::Error),
    /// The CPUID has more entries than KVM takes.
    #[error("{0} CPUID entries are more than KVM takes")]
    Entries(usize),
    /// The host has less than the template.
    #[error(
        "this host's CPU or KVM lacks {features} of the CPU template {template}: use another host, or for a \
         new machine a lower template or --cpu-template host"
    )]
    Lacks {
        /// Name of the template.
        template: &'static str,
        /// What is lacking.
        features: String,
    },
}

/// CPUID that KVM supports on this host. KVM executes the instruction for each leaf, which takes some
/// 0.3 ms under a hypervisor, so a machine asks once.
#[derive(Debug)]
pub struct Supported {
    /// Of the template, or the host's.
    leaves: Vec<kvm_cpuid_entry2>,
    tsc_deadline: bool,
}

impl Supported {
    /// Asks KVM.
    ///
    /// # Errors
    /// KVM does not report its CPUID, or that is less than the template's.
    pub fn of(kvm: &Kvm, template: Template) -> Result<Self, CpuidError> {
        let leaves = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(CpuidError::Supported)?;
        // KVM reports the TSC deadline timer as a capability, because its in-kernel APIC implements it.
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        Self::with(leaves.as_slice(), tsc_deadline, template)
    }

    fn with(
        leaves: &[kvm_cpuid_entry2],
        tsc_deadline: bool,
        template: Template,
    ) -> Result<Self, CpuidError> {
        let leaves = template.of_host(leaves)?;
        if !template.is_host() && !tsc_deadline {
            return Err(CpuidError::Lacks {
                template: template.name(),
                features: "tsc_deadline_timer".to_owned(),
            });
        }
        Ok(Self {
            leaves,
            tsc_deadline,
        })
    }

    /// As if KVM had reported these.
    #[cfg(test)]
    fn mocked(
        leaves: &[kvm_cpuid_entry2],
        tsc_deadline: bool,
        template: Template,
    ) -> Result<Self, CpuidError> {
        Self::with(leaves, tsc_deadline, template)
    }

    /// Returns the CPUID of CPU `cpu` (from 0) of `cpus`.
    ///
    /// # Errors
    /// The result has too many entries.
    pub fn filtered(&self, cpu: u8, cpus: u8) -> Result<CpuId, CpuidError> {
        let entries = filter(&self.leaves, cpu, cpus, self.tsc_deadline);
        CpuId::from_entries(&entries).map_err(|_| CpuidError::Entries(entries.len()))
    }
}

/// Returns how the CPUID of a saved vCPU differs from that of one here, in words; `None`: not at all.
pub fn difference(saved: &[kvm_cpuid_entry2], here: &[kvm_cpuid_entry2]) -> Option<String> {
    let leaf = first_difference(saved, here)?;
    let (was, is) = (vendor(saved), vendor(here));
    let lacks = template::lacking(saved, here);
    let why = match lacks.is_empty() {
        _ if was != is => format!("its CPU was of {was}, and this one is of {is}"),
        true => "its CPU or its KVM is another".to_owned(),
        false => format!("this one lacks {}", lacks.join(", ")),
    };
    Some(format!("CPUID differs in leaf {leaf:#x}: {why}"))
}

/// Returns the vendor's name, as leaf 0 has it.
fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let leaf = entries.iter().find(|entry| entry.function == 0);
    let leaf = leaf.copied().unwrap_or_default();
    let bytes = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    String::from_utf8_lossy(bytes.as_flattened())
        .escape_debug()
        .to_string()
}

/// Returns the first leaf in which two CPUIDs of one vCPU differ; `None` if they are the same.
pub fn first_difference(a: &[kvm_cpuid_entry2], b: &[kvm_cpuid_entry2]) -> Option<u32> {
    let all = a.iter().map(Some).chain([None]);
    let mut pairs = all.zip(b.iter().map(Some).chain([None]));
    let longer = if a.len() > b.len() { a } else { b };
    let behind = longer.get(a.len().min(b.len()));
    let differing = pairs.find(|(a, b)| a != b);
    let differing = differing.and_then(|(a, b)| a.or(b)).or(behind);
    differing.map(|entry| entry.function)
}

/// Returns the number of bits of a guest physical address.
pub fn physical_bits(cpuid: &CpuId) -> u8 {
    let leaf = |function| {
        cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function)
    };
    match leaf(0x8000_0008) {
        // GuestPhysAddrSize, where KVM reports that fewer bits can be mapped.
        Some(entry) => match (entry.eax >> 16) as u8 {
            0 => entry.eax as u8,
            guest => guest.min(entry.eax as u8),
        },
        None => 36,
    }
}

mod ecx1 {
    /// Branch records in memory (debug store): their layout with 64 bits, and by privilege.
    pub(super) const DEBUG_STORE: u32 = 1 << 2 | 1 << 4;
    pub(super) const VMX: u32 = 1 << 5;
    pub(super) const PERF_CAPABILITIES: u32 = 1 << 15;
    pub(super) const TSC_DEADLINE: u32 = 1 << 24;
    pub(super) const HYPERVISOR: u32 = 1 << 31;
}
/// EBX of leaf 0 for AMD and Hygon: the first letters of AuthenticAMD and HygonGenuine.
const AMD_VENDORS: [u32; 2] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"Hygo")];
const EDX1_HTT: u32 = 1 << 28;
/// Branch records in memory (debug store).
const EDX1_DEBUG_STORE: u32 = 1 << 21;
/// CmpLegacy (AMD): the logical CPUs of a package are cores.
const CMP_LEGACY: u32 = 1 << 1;
/// Extended performance counters (AMD): core, north bridge, last-level cache.
const AMD_COUNTERS: u32 = 1 << 23 | 1 << 24 | 1 << 28;

/// Virtualization, its secure start, and sampling and profiling (AMD).
const AMD_SVM: u32 = 1 << 2 | 1 << 10 | 1 << 12 | 1 << 15;
/// Of leaf 7, EBX: enclaves, transactions (HLE, RTM), processor trace.
const EBX7_HIDDEN: u32 = 1 << 2 | 1 << 4 | 1 << 11 | 1 << 25;
/// Of leaf 7, ECX: launch control of enclaves.
const ECX7_HIDDEN: u32 = 1 << 30;
/// Of leaf 7, EDX: branch records, tiles.
const EDX7_HIDDEN: u32 = 1 << 19 | 1 << 22 | 1 << 24 | 1 << 25;
/// Of leaf 7.1, EAX and EDX: further kinds of numbers in tiles (AMX-FP16, AMX-COMPLEX).
const EAX7_1_HIDDEN: u32 = 1 << 21;
const EDX7_1_HIDDEN: u32 = 1 << 8;

/// Level types of leaves 0xB and 0x1F.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

fn filter(
    supported: &[kvm_cpuid_entry2],
    cpu: u8,
    cpus: u8,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let first = supported
        .iter()
        .find(|e| e.function == 0)
        .copied()
        .unwrap_or_default();
    let max_leaf = first.eax;
    let amd = AMD_VENDORS.contains(&first.ebx);
    let mut entries: Vec<_> = supported
        .iter()
        .copied()
        .filter(|e| !is_replaced(e.function))
        .collect();
    for entry in &mut entries {
        adjust(entry, cpu, cpus, tsc_deadline, amd);
    }
    for leaf in [0xB, 0x1F].into_iter().filter(|&leaf| leaf <= max_leaf) {
        entries.extend(topology(leaf, cpu, cpus));
    }
    entries
}

/// Returns whether a leaf describes the host's topology, and so is replaced or left out.
fn is_replaced(function: u32) -> bool {
    matches!(function, 0xB | 0x1F | 0x8000_0026)
}

fn adjust(entry: &mut kvm_cpuid_entry2, cpu: u8, cpus: u8, tsc_deadline: bool, amd: bool) {
    let many = cpus > 1;
    let set = |register: &mut u32, bits: u32, on: bool| {
        *register = if on {
            *register | bits
        } else {
            *register & !bits
        };
    };
    match entry.function {
        0x1 => {
            // The cache line flush size in bits 8 to 15 is kept.
            entry.ebx = entry.ebx & 0xFFFF | u32::from(cpus) << 16 | u32::from(cpu) << 24;
            entry.ecx |= ecx1::HYPERVISOR;
            entry.ecx &= !(ecx1::PERF_CAPABILITIES | ecx1::VMX | ecx1::DEBUG_STORE);
            entry.edx &= !EDX1_DEBUG_STORE;
            set(&mut entry.ecx, ecx1::TSC_DEADLINE, tsc_deadline);
            set(&mut entry.edx, EDX1_HTT, many);
        }
        // Caches (Intel). A cache type of 0 ends the list.
        0x4 if entry.eax & 0x1F != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { id_space(cpus) - 1 } else { 0 };
            let cores = id_space(cpus) - 1;
            entry.eax = entry.eax & 0x3FFF | sharing << 14 | cores << 26;
        }
        0x7 if entry.index == 0 => {
            entry.ebx &= !EBX7_HIDDEN;
            entry.ecx &= !ECX7_HIDDEN;
            entry.edx &= !EDX7_HIDDEN;
        }
        0x7 if entry.index == 1 => {
            entry.eax &= !EAX7_1_HIDDEN;
            entry.edx &= !EDX7_1_HIDDEN;
        }
        // Performance counters (Intel and AMD), enclaves, processor trace, branch records, tiles;
        // virtualization and encrypted memory (AMD).
        0xA | 0x12 | 0x14 | 0x1C | 0x1D | 0x1E | 0x8000_000A | 0x8000_001F | 0x8000_0022 => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        0x8000_0001 => {
            set(&mut entry.ecx, AMD_COUNTERS | AMD_SVM, false);
            set(&mut entry.ecx, CMP_LEGACY, many && amd);
        }
        // Number of cores, and the number of APIC id bits that count them (AMD).
        0x8000_0008 if amd => {
            entry.ecx = entry.ecx & !0xF0FF | u32::from(cpus - 1) | id_bits(cpus) << 12;
        }
        // Caches (AMD).
        0x8000_001D if entry.eax & 0x1F != 0 => {
            let sharing = if entry.eax >> 5 & 7 >= 3 {
                u32::from(cpus) - 1
            } else {
                0
            };
            entry.eax = entry.eax & 0x3FFF | sharing << 14;
        }
        // Extended APIC id (AMD): one thread per core, one node.
        0x8000_001E => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (cpu.into(), cpu.into(), 0, 0);
        }
        _ => {}
    }
}

/// Returns a topology leaf: the x2APIC id, and the levels. A core has one thread; all cores are in
/// one package.
fn topology(leaf: u32, cpu: u8, cpus: u8) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | kind << 8,
        edx: cpu.into(),
        ..Default::default()
    };
    [
        level(0, 0, 1, LEVEL_THREAD),
        level(1, id_bits(cpus), cpus.into(), LEVEL_CORE),
        level(2, 0, 0, 0),
    ]
}

/// Returns the number of APIC id bits that count the CPUs of a package.
fn id_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

/// Returns the number of APIC ids that a package has room for.
fn id_space(cpus: u8) -> u32 {
    1 << id_bits(cpus)
}

#[cfg(test)]
#[path = "cpuid_test.rs"]
mod tests;
