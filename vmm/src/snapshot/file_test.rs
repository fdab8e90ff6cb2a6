use kvm_bindings::{
    kvm_clock_data, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_pit_state2, kvm_regs, kvm_sregs,
};
use proptest::prelude::*;

use super::*;
use crate::cpuid::Template;
use crate::snapshot::{
    DeviceState, FilterState, FunctionState, KvmState, Model, MsixState, NetState, Progress,
    QueueState, SerialState, TransportState, VcpuState,
};

fn vcpu() -> VcpuState {
    VcpuState {
        cpuid: Vec::new(),
        tsc_khz: 7,
        mp_state: kvm_mp_state::default(),
        regs: kvm_regs::default(),
        sregs: kvm_sregs::default(),
        xsave: Some(Box::default()),
        xcrs: None,
        debug: None,
        lapic: kvm_lapic_state::default(),
        msrs: Vec::new(),
        events: None,
    }
}

pub(in crate::snapshot) fn state() -> MachineState {
    let net = NetState {
        mac: [2; 6],
        offloads: 1,
        pairs: 2,
        filter: FilterState {
            modes: [true; 6],
            unicast: Some(vec![[4; 6]]),
            multicast: None,
        },
    };
    let transport = TransportState {
        msix: MsixState {
            table: vec![9; 32],
            pending: vec![1],
        },
        queues: vec![QueueState {
            size: 8,
            enabled: true,
            vector: 1,
            rings: [0x1000, 0x2000, 0x3000],
        }],
        device: Some(DeviceState {
            queues: vec![Progress {
                queue: 0,
                next_available: 5,
                next_used: 3,
                taken: vec![1, 2],
            }],
            model: Model::Net(net),
        }),
        ..TransportState::default()
    };
    MachineState {
        base: None,
        template: Template::X86_64V2,
        memory_bytes: 1 << 30,
        kvm: KvmState {
            chips: [kvm_irqchip::default(); 3],
            pit: kvm_pit_state2::default(),
            clock: kvm_clock_data::default(),
        },
        vcpus: vec![vcpu(), vcpu()],
        serial: SerialState::default(),
        rtc_index: 3,
        pm_timer_ns: 4,
        pci_address: 5,
        functions: vec![FunctionState {
            config: vec![7; 256],
            transport: Some(transport),
        }],
    }
}

fn refused(file: &[u8]) -> String {
    match decode(file) {
        Ok(_) => panic!("it was taken"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_state_is_read_as_it_was_written() {
    let file = encode(&state()).unwrap();
    let read = decode(&file).unwrap();
    assert_eq!(read.functions, state().functions);
    assert_eq!(read.vcpus.len(), 2);
    assert_eq!(encode(&read).unwrap(), file);
}

#[test]
fn another_layout_is_refused_with_both_versions() {
    let mut file = encode(&state()).unwrap();
    file[8] = 99;
    // Whatever follows.
    file.truncate(20);
    let why = refused(&file);
    assert!(why.contains("version 99"), "{why}");
    assert!(why.contains(&format!("version {LAYOUT_VERSION}")), "{why}");
}

#[test]
fn a_cut_or_damaged_file_is_refused() {
    let file = encode(&state()).unwrap();
    for length in 0..file.len() {
        refused(&file[..length]);
    }
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 0x10;
        refused(&damaged);
    }
    let longer = [&file[..], b"x"].concat();
    assert!(refused(&longer).contains("more behind its end"));
    assert!(refused(b"ELF").contains("no state of a machine"));
}

#[test]
fn lengths_beyond_reason_are_refused_before_they_cost_anything() {
    let mut file = encode(&state()).unwrap();
    file[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refused(&file).contains("is the most"));
    // A list that says that it has as many elements as fit 64 bits.
    let huge = [&[0][..], &[0xff; 9], &[1]].concat();
    refused(&sealed(&huge));
    let mut many = state();
    many.serial.input = vec![0; 3 << 20];
    assert!(matches!(encode(&many), Err(SnapshotError::TooLong(_))));
}

proptest! {
    #[test]
    fn arbitrary_states_with_a_right_digest_do_no_harm(
        at in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        cut in any::<prop::sample::Index>(),
    ) {
        let whole = postcard::to_stdvec(&state()).unwrap();
        let mut bytes = whole.clone();
        for (at, byte) in at {
            bytes[at.index(whole.len())] = byte;
        }
        if let Ok(state) = decode(&sealed(&bytes)) {
            prop_assert!(encode(&state).is_ok());
        }
        let _ = decode(&sealed(&bytes[..cut.index(whole.len())]));
    }
}
