use super::*;

fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = registers;
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

fn name(name: &[u8; 12]) -> [u32; 3] {
    let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
    // EBX, ECX, EDX. The name lies in EBX, EDX, ECX.
    [word(0), word(8), word(4)]
}

/// Returns a CPUID that KVM may report on an Intel host of 8 cores with 2 threads each, running on
/// CPU 5.
fn intel() -> Vec<kvm_cpuid_entry2> {
    let [ebx, ecx, edx] = name(b"GenuineIntel");
    vec![
        entry(0, 0, [0x1F, ebx, ecx, edx]),
        entry(1, 0, [0x806F8, 0x0510_0800, 0x77FA_B223, 0x1F83_FBFF]),
        entry(4, 0, [0x1C00_4121, 0x02C0_003F, 63, 0]),
        entry(4, 2, [0x1C00_4143, 0x03C0_003F, 2047, 0]),
        entry(4, 3, [0x1C03_C163, 0x03C0_003F, 53247, 4]),
        entry(4, 4, [0, 0, 0, 0]),
        entry(6, 0, [4, 0, 0, 0]),
        entry(0xA, 0, [0x0730_0805, 0, 0, 0x8603]),
        entry(0xB, 0, [1, 2, 0x100, 5]),
        entry(0xB, 1, [4, 16, 0x201, 5]),
        entry(0x1F, 0, [1, 2, 0x100, 5]),
        entry(
            0x4000_0000,
            0,
            [0x4000_0001, 0x4B4D_564B, 0x564B_4D56, 0x4D],
        ),
        entry(0x4000_0001, 0, [0x0100_7EFB, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, 0x121, 0x2C10_0800]),
        entry(0x8000_0008, 0, [0x3034, 0, 0, 0]),
    ]
}

/// Returns such a CPUID of an AMD host.
fn amd() -> Vec<kvm_cpuid_entry2> {
    let [ebx, ecx, edx] = name(b"AuthenticAMD");
    vec![
        entry(0, 0, [0x10, ebx, ecx, edx]),
        entry(1, 0, [0xA2_0F10, 0x0510_0800, 0xF6F8_3203, 0x178B_FBFF]),
        entry(0x8000_0001, 0, [0, 0, 0x75C2_37FF, 0x2FD3_FBFF]),
        entry(0x8000_0008, 0, [0x3030, 0, 0x400F, 0]),
        entry(0x8000_001D, 0, [0x4121, 0, 0, 0]),
        entry(0x8000_001D, 3, [0x3C163, 0, 0, 0]),
        entry(0x8000_001E, 0, [5, 0x102, 0, 0]),
        entry(0x8000_0022, 0, [1, 6, 0, 0]),
        entry(0x8000_0026, 0, [1, 2, 0x100, 5]),
    ]
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    let mut found = entries
        .iter()
        .filter(|e| (e.function, e.index) == (function, index));
    let entry = *found
        .next()
        .unwrap_or_else(|| panic!("no leaf {function:#x}.{index}"));
    assert!(found.next().is_none(), "leaf {function:#x}.{index} twice");
    entry
}

#[test]
fn the_topology_is_the_machine_s_in_every_leaf() {
    for cpus in [1, 2, 3, 8, 31, 32] {
        let bits = u32::from(cpus).next_power_of_two().trailing_zeros();
        for cpu in [0, cpus / 2, cpus - 1] {
            let id = u32::from(cpu);
            let entries = filter(&intel(), cpu, cpus, false);
            let leaf1 = find(&entries, 1, 0);
            assert_eq!(leaf1.ebx, id << 24 | u32::from(cpus) << 16 | 0x0800);
            assert_eq!(leaf1.edx >> 28 & 1, u32::from(cpus > 1));
            for leaf in [0xB, 0x1F] {
                let level = |index| find(&entries, leaf, index);
                let (thread, core, end) = (level(0), level(1), level(2));
                assert_eq!((thread.eax, thread.ebx, thread.ecx), (0, 1, 0x100));
                assert_eq!((core.eax, core.ebx, core.ecx), (bits, cpus.into(), 0x201));
                assert_eq!((end.eax, end.ebx, end.ecx), (0, 0, 2));
                for level in [thread, core, end] {
                    assert_eq!(
                        (level.edx, level.flags),
                        (id, KVM_CPUID_FLAG_SIGNIFCANT_INDEX)
                    );
                }
            }
            for (index, sharing) in [(0, 0), (2, 0), (3, (1 << bits) - 1)] {
                let cache = find(&entries, 4, index);
                assert_eq!(cache.eax >> 26, (1 << bits) - 1, "cores");
                assert_eq!(cache.eax >> 14 & 0xFFF, sharing, "level {index}");
            }
            assert_eq!(find(&entries, 4, 4).eax, 0, "the list's end");
        }
    }
}

#[test]
fn what_the_machine_lacks_or_a_snapshot_can_not_take_along_is_hidden() {
    let all = [u32::MAX; 4];
    let host = [
        1,
        7,
        0x12,
        0x14,
        0x1D,
        0x8000_0001,
        0x8000_000A,
        0x8000_001F,
    ]
    .map(|leaf| entry(leaf, 0, all))
    .into_iter()
    .chain([entry(7, 1, all)])
    .chain(intel().into_iter().take(1))
    .collect::<Vec<_>>();
    let entries = filter(&host, 0, 1, true);
    let leaf = |leaf| find(&entries, leaf, 0);
    for (bit, what) in [(2, "DTES64"), (4, "DS-CPL"), (5, "VMX")] {
        assert_eq!(leaf(1).ecx >> bit & 1, 0, "{what}");
    }
    assert_eq!(leaf(1).edx >> 21 & 1, 0, "DS");
    for (bit, what) in [(2, "SGX"), (4, "HLE"), (11, "RTM"), (25, "processor trace")] {
        assert_eq!(leaf(7).ebx >> bit & 1, 0, "{what}");
    }
    assert_eq!(leaf(7).ebx >> 5 & 1, 1, "AVX2 stays");
    assert_eq!(leaf(7).edx >> 24 & 1, 0, "tiles");
    let more = find(&entries, 7, 1);
    assert_eq!(more.eax >> 21 & 1, 0, "AMX-FP16");
    assert_eq!(more.edx >> 8 & 1, 0, "AMX-COMPLEX");
    assert_eq!(more.eax >> 4 & 1, 1, "AVX-VNNI stays");
    assert_eq!(leaf(0x8000_0001).ecx >> 2 & 1, 0, "SVM");
    for gone in [0x12, 0x14, 0x1D, 0x8000_000A, 0x8000_001F] {
        let entry = leaf(gone);
        let registers = [entry.eax, entry.ebx, entry.ecx, entry.edx];
        assert_eq!(registers, [0; 4], "leaf {gone:#x}");
    }
}

#[test]
fn the_topology_is_the_machine_s_on_amd_too() {
    for cpus in [1, 2, 3, 8, 31, 32] {
        let bits = u32::from(cpus).next_power_of_two().trailing_zeros();
        for cpu in [0, cpus / 2, cpus - 1] {
            let (id, count) = (u32::from(cpu), u32::from(cpus));
            let entries = filter(&amd(), cpu, cpus, false);
            assert_eq!(find(&entries, 1, 0).ebx, id << 24 | count << 16 | 0x0800);
            assert_eq!(
                find(&entries, 0x8000_0001, 0).ecx >> 1 & 1,
                u32::from(cpus > 1)
            );
            assert_eq!(find(&entries, 0x8000_0008, 0).ecx, bits << 12 | (count - 1));
            assert_eq!(find(&entries, 0x8000_001D, 0).eax >> 14 & 0xFFF, 0);
            assert_eq!(find(&entries, 0x8000_001D, 3).eax >> 14 & 0xFFF, count - 1);
            let ids = find(&entries, 0x8000_001E, 0);
            assert_eq!((ids.eax, ids.ebx, ids.ecx), (id, id, 0));
            assert_eq!(find(&entries, 0xB, 1).ebx, count);
            // Levels that the host has and the machine has not, and those beyond the last leaf.
            let absent = |leaf| entries.iter().all(|e| e.function != leaf);
            assert!(absent(0x8000_0026) && absent(0x1F));
        }
    }
}

#[test]
fn counters_are_hidden_and_the_hypervisor_is_not() {
    for (supported, leaf) in [(intel(), 0xA), (amd(), 0x8000_0022)] {
        let entries = filter(&supported, 0, 2, false);
        let counters = find(&entries, leaf, 0);
        let all = [counters.eax, counters.ebx, counters.ecx, counters.edx];
        assert_eq!(all, [0; 4]);
        let ecx = find(&entries, 1, 0).ecx;
        assert_eq!(ecx >> 31, 1, "hypervisor");
        assert_eq!(ecx >> 15 & 1, 0, "PDCM");
        let extended = find(&entries, 0x8000_0001, 0).ecx;
        assert_eq!(
            extended & (1 << 23 | 1 << 24 | 1 << 28),
            0,
            "AMD's counters"
        );
    }
}

#[test]
fn what_kvm_says_stays() {
    let entries = filter(&intel(), 1, 4, true);
    for (function, index) in [(0, 0), (6, 0), (0x4000_0000, 0), (0x4000_0001, 0)] {
        assert_eq!(
            find(&entries, function, index),
            find(&intel(), function, index)
        );
    }
    let features = |tsc_deadline| find(&filter(&intel(), 1, 4, tsc_deadline), 1, 0).ecx;
    let without = find(&intel(), 1, 0).ecx & !(1 << 5 | 1 << 15 | 1 << 24) | 1 << 31;
    assert_eq!(features(false), without);
    assert_eq!(features(true), without | 1 << 24);
}

#[test]
fn address_bits_are_those_a_guest_can_use() {
    let with = |eax| CpuId::from_entries(&[entry(0x8000_0008, 0, [eax, 0, 0, 0])]).unwrap();
    assert_eq!(physical_bits(&with(0x3034)), 52);
    assert_eq!(physical_bits(&with(0x30_3034)), 48);
    assert_eq!(physical_bits(&with(0x36_302E)), 46);
    assert_eq!(physical_bits(&CpuId::from_entries(&[]).unwrap()), 36);
}
