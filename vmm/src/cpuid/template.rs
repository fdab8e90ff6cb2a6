//! CPU templates: a CPUID that is the same on every host of a vendor that has what is in it.
//!
//! # Theory of operation
//! Without a template a guest has the CPUID of its host, so its snapshot can be restored where the CPU,
//! the microcode and KVM are alike. With one it has a fixed CPUID, in which nothing is the host's but its
//! vendor: features of a level of the x86-64 psABI and what every kernel uses besides, and the same
//! model, name, caches and address width everywhere. A host that lacks one of the features runs no
//! machine of the template, and restores none: the error names what it lacks.
//!
//! What is not in the template is hidden, also what would help a guest: the controls of speculation
//! (SPEC_CTRL, MD_CLEAR and others) differ between hosts of a level, so a guest knows of none.
//! Registers that tell of the host are not saved ([`is_of_host`]).
//! Sources: x86-64 psABI, 3.1.1 (levels); Intel SDM 2A, CPUID; AMD APM 3, appendix E.
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};

use super::{AMD_VENDORS, CpuidError};

/// CPU that a guest is told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Template {
    /// That of the host.
    #[default]
    Host,
    /// The level x86-64-v1: up to SSE 2.
    X86_64V1,
    /// The level x86-64-v2: up to SSE 4.2.
    X86_64V2,
    /// The level x86-64-v3: with AVX2.
    X86_64V3,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// Features by leaf, index and register: bit, name, and the level from which it is in a template; 0: in
/// none.
type Features = (u32, u32, Register, &'static [(u32, &'static str, u8)]);

const FEATURES: &[Features] = &[
    (
        1,
        0,
        Edx,
        &[
            (0, "fpu", 1),
            (2, "de", 1),
            (3, "pse", 1),
            (4, "tsc", 1),
            (5, "msr", 1),
            (6, "pae", 1),
            (7, "mce", 1),
            (8, "cx8", 1),
            (9, "apic", 1),
            (11, "sep", 1),
            (12, "mtrr", 1),
            (13, "pge", 1),
            (14, "mca", 1),
            (15, "cmov", 1),
            (16, "pat", 1),
            (17, "pse36", 1),
            (19, "clflush", 1),
            (23, "mmx", 1),
            (24, "fxsr", 1),
            (25, "sse", 1),
            (26, "sse2", 1),
        ],
    ),
    (
        1,
        0,
        Ecx,
        &[
            (0, "sse3", 2),
            (1, "pclmulqdq", 3),
            (9, "ssse3", 2),
            (12, "fma", 3),
            (13, "cx16", 2),
            (17, "pcid", 0),
            (19, "sse4_1", 2),
            (20, "sse4_2", 2),
            (21, "x2apic", 1),
            (22, "movbe", 3),
            (23, "popcnt", 2),
            (25, "aes", 3),
            (26, "xsave", 3),
            (28, "avx", 3),
            (29, "f16c", 3),
            (30, "rdrand", 3),
        ],
    ),
    // Always on: the local APIC's timer does not stop.
    (6, 0, Eax, &[(2, "arat", 1)]),
    (
        7,
        0,
        Ebx,
        &[
            (0, "fsgsbase", 3),
            (3, "bmi1", 3),
            (5, "avx2", 3),
            (7, "smep", 3),
            (8, "bmi2", 3),
            (9, "erms", 0),
            (10, "invpcid", 0),
            (16, "avx512f", 0),
            (17, "avx512dq", 0),
            (18, "rdseed", 0),
            (19, "adx", 0),
            (20, "smap", 0),
            (21, "avx512ifma", 0),
            (23, "clflushopt", 0),
            (24, "clwb", 0),
            (28, "avx512cd", 0),
            (29, "sha_ni", 0),
            (30, "avx512bw", 0),
            (31, "avx512vl", 0),
        ],
    ),
    (
        7,
        0,
        Ecx,
        &[
            (1, "avx512vbmi", 0),
            (2, "umip", 0),
            (3, "pku", 0),
            (6, "avx512_vbmi2", 0),
            (8, "gfni", 0),
            (9, "vaes", 0),
            (10, "vpclmulqdq", 0),
            (11, "avx512_vnni", 0),
            (12, "avx512_bitalg", 0),
            (14, "avx512_vpopcntdq", 0),
            (16, "la57", 0),
            (22, "rdpid", 0),
        ],
    ),
    (
        7,
        0,
        Edx,
        &[
            (4, "fsrm", 0),
            (10, "md_clear", 0),
            (26, "spec_ctrl", 0),
            (27, "stibp", 0),
            (28, "flush_l1d", 0),
            (29, "arch_capabilities", 0),
            (31, "ssbd", 0),
        ],
    ),
    (
        0xD,
        1,
        Eax,
        &[
            (0, "xsaveopt", 3),
            (1, "xsavec", 0),
            (2, "xgetbv1", 0),
            (3, "xsaves", 0),
        ],
    ),
    (
        0x4000_0001,
        0,
        Eax,
        &[
            (0, "kvmclock", 1),
            (1, "kvm_nopiodelay", 1),
            (3, "kvmclock2", 1),
            (24, "kvmclock_stable", 1),
        ],
    ),
    (0x8000_0001, 0, Ecx, &[(0, "lahf_lm", 2), (5, "lzcnt", 3)]),
    (
        0x8000_0001,
        0,
        Edx,
        &[
            (11, "syscall", 1),
            (20, "nx", 1),
            (26, "pdpe1gb", 0),
            (27, "rdtscp", 2),
            (29, "lm", 1),
        ],
    ),
];

/// Bits of a guest's physical and linear addresses.
const PHYSICAL_BITS: u32 = 40;
const LINEAR_BITS: u32 = 48;
/// Family, model and stepping (leaf 1, EAX): by the vendor, of a CPU that has the level and no more that
/// systems conclude from its model. Intel's are Nehalem and Haswell, AMD's is Zen 2 for both.
const INTEL_SIGNATURES: [u32; 2] = [0x1_06A5, 0x3_06F2];
const AMD_SIGNATURE: u32 = 0x83_0F10;
/// Lines of 64 bytes that CLFLUSH flushes, in eights, and the place of it in EBX of leaf 1.
const CLFLUSH: u32 = 8 << 8;
/// Parts of the extended state: x87 and SSE, AVX.
const XCR0: u32 = 0b111;
/// Length of an XSAVE area without AVX, and of AVX's part of it, bytes.
const XSAVE_BYTES: u32 = 576;
const AVX_BYTES: u32 = 256;
/// The caches of Intel's leaf 4: EAX (type and level), EBX (lines of 64 bytes, ways), ECX (sets). L1 for
/// data and for code, L2, L3.
const CACHES: [[u32; 3]; 4] = [
    [0x121, 7 << 22 | 63, 63],
    [0x122, 7 << 22 | 63, 63],
    [0x143, 7 << 22 | 63, 511],
    [0x163, 15 << 22 | 63, 8_191],
];
/// Of the same caches in AMD's leaves 0x8000_0005, ECX and EDX, and 0x8000_0006, ECX and EDX.
const AMD_L1: [u32; 2] = [32 << 24 | 8 << 16 | 1 << 8 | 64; 2];
const AMD_L2_L3: [u32; 2] = [
    256 << 16 | 6 << 12 | 1 << 8 | 64,
    16 << 18 | 8 << 12 | 1 << 8 | 64,
];

impl Template {
    /// All that there are besides the host's.
    pub const NAMED: [Self; 3] = [Self::X86_64V1, Self::X86_64V2, Self::X86_64V3];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::X86_64V1 => "x86-64-v1",
            Self::X86_64V2 => "x86-64-v2",
            Self::X86_64V3 => "x86-64-v3",
        }
    }

    /// Whether it is the host's CPU.
    pub fn is_host(self) -> bool {
        self == Self::Host
    }

    fn level(self) -> u8 {
        match self {
            Self::Host => 0,
            Self::X86_64V1 => 1,
            Self::X86_64V2 => 2,
            Self::X86_64V3 => 3,
        }
    }

    /// Returns the template's CPUID in the place of `supported`, which is the host's, before the
    /// machine's topology is in it.
    ///
    /// # Errors
    /// The host lacks something that is in the template.
    pub(super) fn of_host(
        self,
        supported: &[kvm_cpuid_entry2],
    ) -> Result<Vec<kvm_cpuid_entry2>, CpuidError> {
        if self.is_host() {
            return Ok(supported.to_vec());
        }
        let vendor = find(supported, 0, 0).unwrap_or_default();
        let entries = self.entries(vendor);
        let mut lacks: Vec<String> = lacking(&entries, supported)
            .into_iter()
            .map(str::to_owned)
            .collect();
        let has_bits = physical_bits(supported);
        if has_bits < PHYSICAL_BITS {
            lacks.push(format!(
                "{PHYSICAL_BITS} bits of physical addresses (it has {has_bits})"
            ));
        }
        match lacks.is_empty() {
            true => Ok(entries),
            false => Err(CpuidError::Lacks {
                template: self.name(),
                features: lacks.join(", "),
            }),
        }
    }

    /// `vendor`: the host's leaf 0.
    fn entries(self, vendor: kvm_cpuid_entry2) -> Vec<kvm_cpuid_entry2> {
        let is_amd = AMD_VENDORS.contains(&vendor.ebx);
        let (ebx, ecx, edx) = (vendor.ebx, vendor.ecx, vendor.edx);
        let has_avx = self.level() >= 3;
        let signature = match is_amd {
            true => AMD_SIGNATURE,
            false => INTEL_SIGNATURES[usize::from(has_avx)],
        };
        let mut entries = vec![
            entry(0, 0, [0xD, ebx, ecx, edx]),
            entry(1, 0, [signature, CLFLUSH, 0, 0]),
            entry(6, 0, [0; 4]),
            indexed(7, 0, [0; 4]),
        ];
        if !is_amd {
            let caches = (0..)
                .zip(CACHES)
                .map(|(index, [eax, ebx, ecx])| indexed(4, index, [eax, ebx, ecx, 0]));
            entries.extend(caches);
            entries.push(indexed(4, CACHES.len() as u32, [0; 4]));
        }
        if has_avx {
            let bytes = XSAVE_BYTES + AVX_BYTES;
            entries.extend([
                indexed(0xD, 0, [XCR0, bytes, bytes, 0]),
                indexed(0xD, 1, [0; 4]),
                indexed(0xD, 2, [AVX_BYTES, XSAVE_BYTES, 0, 0]),
            ]);
        }
        let kvm = b"KVMKVMKVM\0\0\0";
        let word = |bytes: &[u8], at: usize| {
            u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four bytes"))
        };
        entries.extend([
            entry(
                0x4000_0000,
                0,
                [0x4000_0001, word(kvm, 0), word(kvm, 1), word(kvm, 2)],
            ),
            entry(0x4000_0001, 0, [0; 4]),
            match is_amd {
                true => entry(0x8000_0000, 0, [0x8000_0008, ebx, ecx, edx]),
                false => entry(0x8000_0000, 0, [0x8000_0008, 0, 0, 0]),
            },
            entry(
                0x8000_0001,
                0,
                [if is_amd { signature } else { 0 }, 0, 0, 0],
            ),
        ]);
        let mut brand = [0; 48];
        let title = format!("slipgate {}", self.name());
        brand[..title.len()].copy_from_slice(title.as_bytes());
        for (leaf, part) in (0x8000_0002..).zip(brand.chunks(16)) {
            entries.push(entry(leaf, 0, [0, 1, 2, 3].map(|at| word(part, at))));
        }
        if is_amd {
            entries.push(entry(0x8000_0005, 0, [0, 0, AMD_L1[0], AMD_L1[1]]));
        }
        let [l2, l3] = if is_amd { AMD_L2_L3 } else { [AMD_L2_L3[0], 0] };
        entries.push(entry(0x8000_0006, 0, [0, 0, l2, l3]));
        entries.push(entry(
            0x8000_0008,
            0,
            [LINEAR_BITS << 8 | PHYSICAL_BITS, 0, 0, 0],
        ));
        for &(leaf, index, register, bits) in FEATURES {
            let entry = entries
                .iter_mut()
                .find(|entry| (entry.function, entry.index) == (leaf, index));
            if let Some(entry) = entry {
                let in_it = bits
                    .iter()
                    .filter(|(_, _, level)| (1..=self.level()).contains(level));
                *of_mut(entry, register) |= in_it.fold(0, |all, (bit, ..)| all | 1 << bit);
            }
        }
        entries
    }
}

/// Returns the names of the features that one CPUID has and another lacks.
pub(super) fn lacking(
    wanted: &[kvm_cpuid_entry2],
    there: &[kvm_cpuid_entry2],
) -> Vec<&'static str> {
    let bits_of = |entries: &[kvm_cpuid_entry2], leaf, index, register| {
        find(entries, leaf, index).map_or(0, |mut entry| *of_mut(&mut entry, register))
    };
    let lacking = FEATURES.iter().flat_map(|&(leaf, index, register, bits)| {
        let lacks = bits_of(wanted, leaf, index, register) & !bits_of(there, leaf, index, register);
        bits.iter()
            .filter(move |(bit, ..)| lacks >> bit & 1 != 0)
            .map(|(_, name, _)| *name)
    });
    lacking.collect()
}

/// Whether an MSR tells of the host or of what it can do, and not of the guest: microcode, capabilities
/// of the CPU, of its counters and of its virtualization. A machine with a template does not have those
/// registers by its CPUID.
pub(crate) fn is_of_host(msr: u32) -> bool {
    matches!(
        msr,
        0x3A | 0x8B | 0xCE | 0xCF | 0x10A | 0x122 | 0x345 | 0x480..=0x491 | 0xC001_1029
    )
}

fn physical_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    find(entries, 0x8000_0008, 0).map_or(36, |entry| match entry.eax >> 16 & 0xFF {
        0 => entry.eax & 0xFF,
        guest => guest.min(entry.eax & 0xFF),
    })
}

fn find(entries: &[kvm_cpuid_entry2], leaf: u32, index: u32) -> Option<kvm_cpuid_entry2> {
    let mut all = entries.iter().copied();
    all.find(|entry| (entry.function, entry.index) == (leaf, index))
}

fn of_mut(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Eax => &mut entry.eax,
        Ebx => &mut entry.ebx,
        Ecx => &mut entry.ecx,
        Edx => &mut entry.edx,
    }
}

fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

/// An entry of a leaf that has several.
fn indexed(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        ..entry(function, index, registers)
    }
}

#[cfg(test)]
#[path = "template_test.rs"]
mod tests;
