//! Snapshots of small machines, and of functions in each state of a driver.
use kvm_bindings::{
    kvm_clock_data, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_pit_state2, kvm_regs, kvm_sregs,
};
use slipgate_vmm::{
    cpuid::Template,
    fake::hostile::{FEATURES, Machine, Step},
    snapshot::{
        BaseState, KvmState, MachineState, Runs, SerialState, SnapshotId, VcpuState, encode,
    },
};

use super::{
    Seeds,
    running_devices::{More, running},
};
use crate::snapshot::kind;

pub(super) fn snapshot() -> Seeds {
    let functions = |steps: &[Step]| {
        let mut machine = Machine::new();
        steps.iter().for_each(|step| machine.step(step));
        let state = postcard::to_stdvec(&machine.saved()).expect("plain data");
        [&[kind::FUNCTIONS, 0][..], &state].concat()
    };
    let up = |function| Step::BringUp(function, FEATURES | 1 << 32, 7, 16);
    let message = |vector| Step::Message(0, vector, 0x31 + vector);
    // A descriptor, and the available ring that has it.
    let chain = [
        Step::Memory(0, vec![0, 0, 1, 0, 0, 0, 0, 0]),
        Step::Memory(8, vec![64, 0, 0, 0, 2, 0, 0, 0]),
        Step::Memory(0x400, vec![0, 0, 1, 0, 0, 0]),
    ];
    let served = [&[up(0), up(1)][..], &chain, &[Step::Serve(0, 0)]].concat();
    let interrupting = [up(0), message(0), message(1), Step::Signal(0, 0)];
    let held = [up(0), Step::Signal(0, 1), Step::NeedsReset(0)];
    let file = encode(&machine(&served)).expect("a small state");
    let mut differing = machine(&served);
    differing.base = Some(BaseState {
        id: SnapshotId([7; 32]),
        runs: Runs(vec![(0, 1), (5, 300), (16_000, 384)]),
    });
    let differing = encode(&differing).expect("a small state");
    vec![
        ("off", functions(&[])),
        ("served", functions(&served)),
        ("interrupting", functions(&interrupting)),
        ("held", functions(&held)),
        ("file", [&[kind::FILE][..], &file].concat()),
        ("state", [&[kind::STATE][..], &file[48..]].concat()),
        ("devices", running(More::None)),
        ("devices_waiting", running(More::Offered)),
        ("devices_taken", running(More::Taken)),
        ("differing", [&[kind::STATE][..], &differing[48..]].concat()),
    ]
}

fn machine(steps: &[Step]) -> MachineState {
    let mut pci = Machine::new();
    steps.iter().for_each(|step| pci.step(step));
    let (pci_address, functions) = pci.saved();
    let vcpu = VcpuState {
        cpuid: Vec::new(),
        tsc_khz: 2_500_000,
        mp_state: kvm_mp_state::default(),
        regs: kvm_regs::default(),
        sregs: kvm_sregs::default(),
        xsave: None,
        xcrs: None,
        debug: None,
        lapic: kvm_lapic_state::default(),
        msrs: Vec::new(),
        events: None,
    };
    MachineState {
        base: None,
        memory_bytes: 64 << 20,
        template: Template::X86_64V3,
        kvm: KvmState {
            chips: [kvm_irqchip::default(); 3],
            pit: kvm_pit_state2::default(),
            clock: kvm_clock_data::default(),
        },
        vcpus: vec![vcpu],
        serial: SerialState::default(),
        rtc_index: 0,
        pm_timer_ns: 1,
        pci_address,
        functions,
    }
}
