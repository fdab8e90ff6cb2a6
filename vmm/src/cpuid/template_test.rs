use kvm_bindings::kvm_cpuid_entry2;

use super::*;
use crate::cpuid::{Supported, difference, first_difference};

/// A host that has every feature, of this model, with so many bits of addresses.
fn host(vendor: &[u8; 12], model: u32, bits: u32) -> Vec<kvm_cpuid_entry2> {
    let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
    let mut entries = vec![
        entry(0, 0, [0x20, word(0), word(8), word(4)]),
        entry(1, 0, [model, 0x0510_0800, u32::MAX, u32::MAX]),
        entry(6, 0, [0x77, 2, 9, 0]),
        indexed(7, 0, [2, u32::MAX, u32::MAX, u32::MAX]),
        indexed(0xD, 0, [0xE7, 2_440, 2_440, 0]),
        indexed(0xD, 1, [0xF, 0, 0, 0]),
        entry(0x4000_0000, 0, [0x4000_0001, 1, 2, 3]),
        entry(0x4000_0001, 0, [u32::MAX, 0, 0, 0]),
        entry(0x8000_0000, 0, [0x8000_0028, 0, 0, 0]),
        entry(0x8000_0001, 0, [model, 0, u32::MAX, u32::MAX]),
        entry(0x8000_0008, 0, [0x3000 | bits, model, 0, 0]),
    ];
    // More that differs between hosts.
    entries.push(entry(0x16, 0, [model, model, model, 0]));
    entries
}

/// Takes a feature from a host.
fn without(mut host: Vec<kvm_cpuid_entry2>, name: &str) -> Vec<kvm_cpuid_entry2> {
    let place = FEATURES.iter().find_map(|(leaf, index, register, bits)| {
        let bit = bits.iter().find(|(_, it, _)| *it == name)?.0;
        Some((*leaf, *index, *register, bit))
    });
    let (leaf, index, register, bit) = place.unwrap();
    let entry = host
        .iter_mut()
        .find(|entry| (entry.function, entry.index) == (leaf, index));
    *of_mut(entry.unwrap(), register) &= !(1 << bit);
    host
}

fn guest(host: &[kvm_cpuid_entry2], template: Template, cpu: u8) -> Vec<kvm_cpuid_entry2> {
    let host = Supported::mocked(host, true, template).unwrap();
    host.filtered(cpu, 2).unwrap().as_slice().to_vec()
}

#[test]
fn hosts_of_one_template_have_one_cpuid() {
    for vendor in [b"GenuineIntel", b"AuthenticAMD"] {
        let (old, new) = (host(vendor, 0x306F2, 40), host(vendor, 0xC06F2, 52));
        // What the newer one alone has is not in it.
        let old = ["avx512f", "spec_ctrl", "xsaves", "invpcid", "pdpe1gb"]
            .into_iter()
            .fold(old, without);
        for template in Template::NAMED {
            for cpu in 0..2 {
                let (old, new) = (guest(&old, template, cpu), guest(&new, template, cpu));
                assert_eq!(first_difference(&old, &new), None);
            }
        }
        let (old, new) = (
            guest(&old, Template::Host, 0),
            guest(&new, Template::Host, 0),
        );
        assert!(first_difference(&old, &new).is_some());
    }
}

#[test]
fn a_host_that_lacks_a_feature_is_refused_with_its_name() {
    let all = host(b"GenuineIntel", 0x306F2, 46);
    for (template, name) in [
        (Template::X86_64V2, "sse4_2"),
        (Template::X86_64V2, "kvmclock"),
        (Template::X86_64V3, "avx2"),
        (Template::X86_64V3, "lzcnt"),
        (Template::X86_64V3, "xsaveopt"),
    ] {
        let lacks = without(all.clone(), name);
        let refused = Supported::mocked(&lacks, true, template).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains(&format!("lacks {name} ")), "{refused}");
        assert!(refused.contains(template.name()), "{refused}");
    }
    let no_avx2 = without(all.clone(), "avx2");
    assert!(Supported::mocked(&no_avx2, true, Template::X86_64V2).is_ok());
    let two = without(without(all.clone(), "fma"), "bmi2");
    let refused = Supported::mocked(&two, true, Template::X86_64V3).unwrap_err();
    assert!(refused.to_string().contains("fma, bmi2"), "{refused}");
    // The local APIC's deadline is KVM's.
    let refused = Supported::mocked(&all, false, Template::X86_64V2).unwrap_err();
    assert!(
        refused.to_string().contains("tsc_deadline_timer"),
        "{refused}"
    );
    let narrow = host(b"GenuineIntel", 0x306F2, 39);
    let refused = Supported::mocked(&narrow, true, Template::X86_64V2).unwrap_err();
    let says = "40 bits of physical addresses (it has 39)";
    assert!(refused.to_string().contains(says), "{refused}");
}

/// Every template says that the local APIC's timer does not stop, in leaf 6, which CPUs of before 2006 lack.
#[test]
fn a_host_whose_cpuid_ends_below_leaf_6_is_refused_for_every_template() {
    for vendor in [b"GenuineIntel", b"AuthenticAMD"] {
        let mut old = host(vendor, 0xF4A, 40);
        old[0].eax = 5;
        old.retain(|entry| !(6..0x4000_0000).contains(&entry.function));
        for template in Template::NAMED {
            let refused = Supported::mocked(&old, true, template).unwrap_err();
            let refused = refused.to_string();
            let lacks = "this host's CPU or KVM lacks arat";
            assert!(refused.starts_with(lacks), "{refused}");
            assert!(refused.contains(template.name()), "{refused}");
        }
        // Without a template it has what its host has.
        assert!(Supported::mocked(&old, true, Template::Host).is_ok());
    }
}

#[test]
fn a_template_has_what_its_level_needs_and_no_more() {
    let all = host(b"AuthenticAMD", 0xA2_0F10, 48);
    let register = |template, leaf, index, register| {
        let mut found = find(&guest(&all, template, 1), leaf, index).unwrap();
        *of_mut(&mut found, register)
    };
    let (v2, v3) = (Template::X86_64V2, Template::X86_64V3);
    let avx2 = |template| register(template, 7, 0, Ebx) >> 5 & 1;
    assert_eq!((avx2(v2), avx2(v3)), (0, 1));
    assert_eq!(register(v3, 7, 0, Edx), 0, "speculation's controls");
    assert_eq!(register(v3, 0xD, 0, Eax), 0b111);
    // Topology and hypervisor are the machine's.
    assert_eq!(register(v3, 1, 0, Ebx), 1 << 24 | 2 << 16 | 0x0800);
    assert_eq!(register(v3, 1, 0, Ecx) >> 31, 1);
    assert_eq!(register(v3, 0xB, 1, Ebx), 2);
    let text: Vec<u8> = (0x8000_0002..=0x8000_0004)
        .map(|leaf| find(&guest(&all, v3, 0), leaf, 0).unwrap())
        .flat_map(|it| [it.eax, it.ebx, it.ecx, it.edx])
        .flat_map(u32::to_le_bytes)
        .collect();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(text.trim_end_matches('\0'), "slipgate x86-64-v3");
}

#[test]
fn a_difference_of_hosts_is_said_in_words() {
    let here = host(b"GenuineIntel", 0x306F2, 46);
    let says = |saved: &[kvm_cpuid_entry2], here: &[kvm_cpuid_entry2]| {
        let (saved, here) = (
            guest(saved, Template::Host, 0),
            guest(here, Template::Host, 0),
        );
        difference(&saved, &here)
    };
    assert_eq!(says(&here, &here), None);
    let less = without(without(here.clone(), "avx512f"), "smap");
    let why = says(&here, &less).unwrap();
    assert!(why.contains("lacks avx512f, smap"), "{why}");
    // More is another CPU too.
    let why = says(&less, &here).unwrap();
    assert!(why.contains("leaf 0x7"), "{why}");
    let other = host(b"AuthenticAMD", 0x306F2, 46);
    let why = says(&here, &other).unwrap();
    assert!(
        why.contains("GenuineIntel") && why.contains("AuthenticAMD"),
        "{why}"
    );
}

#[test]
fn registers_of_the_host_stay_there() {
    for msr in [0x10A, 0x8B, 0x345, 0x480, 0x491] {
        assert!(is_of_host(msr), "{msr:#x}");
    }
    // EFER, the time-stamp counter, the APIC's base.
    for msr in [0xC000_0080, 0x10, 0x1B] {
        assert!(!is_of_host(msr), "{msr:#x}");
    }
}
