//! A device that goes on from a snapshot.
use crate::{
    fake::hostile::{FEATURES, Machine, Step},
    snapshot::{FunctionState, SnapshotError, TransportState},
};

const UP: Step = Step::BringUp(0, FEATURES | 1 << 32, 7, 16);

fn saved(steps: &[Step]) -> (u32, Vec<FunctionState>) {
    let mut machine = Machine::new();
    steps.iter().for_each(|step| machine.step(step));
    machine.saved()
}

fn refused(change: impl FnOnce(&mut Vec<FunctionState>)) -> String {
    let (address, mut functions) = saved(&[UP]);
    change(&mut functions);
    match Machine::new().restore(address, &functions) {
        Ok(()) => panic!("it was restored"),
        Err(SnapshotError::Mismatch(why)) => why,
        Err(other) => panic!("{other}"),
    }
}

fn transport(functions: &mut [FunctionState]) -> &mut TransportState {
    functions[1].transport.as_mut().unwrap()
}

#[test]
fn a_driver_finds_its_device_as_it_was() {
    let steps = [
        UP,
        Step::Message(0, 0, 0x31),
        Step::Message(0, 2, 0x33),
        Step::Signal(0, 1),
    ];
    let (address, functions) = saved(&steps);
    let mut machine = Machine::new();
    machine.restore(address, &functions).unwrap();
    let mut again = machine.saved();
    assert_eq!(again.0, address);
    // The configuration access capability shows what the checks looked at last.
    for (now, before) in again.1.iter_mut().zip(&functions) {
        now.config.clone_from(&before.config);
    }
    // Masked vectors, too, were signalled once.
    let pending = &mut transport(&mut again.1).msix.pending;
    assert_eq!(std::mem::take(pending), [1, 3]);
    assert_eq!(again.1, functions);
    // It serves, signals, and is reset like any other.
    for step in [Step::Serve(0, 0), Step::Signal(0, 0), UP, Step::Serve(0, 2)] {
        machine.step(&step);
    }
}

#[test]
fn progress_and_taken_chains_are_kept() {
    let (address, mut functions) = saved(&[UP]);
    let device = transport(&mut functions).device.as_mut().unwrap();
    device.queues[1].next_available = 9;
    device.queues[1].next_used = 7;
    device.queues[1].taken = vec![3, 1];
    let wanted = device.clone();
    let mut machine = Machine::new();
    machine.restore(address, &functions).unwrap();
    let (_, mut again) = machine.saved();
    assert_eq!(transport(&mut again).device, Some(wanted));
}

#[test]
fn what_can_not_be_is_refused() {
    let why = refused(|functions| functions.truncate(2));
    assert!(why.contains("2 PCI devices in the place of 3"), "{why}");
    let why = refused(|functions| functions[1].transport = None);
    assert!(why.contains("without a virtio device"), "{why}");
    let why = refused(|functions| functions[1].config[2] ^= 1);
    assert!(why.contains("another function"), "{why}");
    let why = refused(|functions| functions[1].config.truncate(9));
    assert!(why.contains("another function"), "{why}");
    let why = refused(|functions| transport(functions).features |= 1 << 20);
    assert!(why.contains("0x100000, which are not offered"), "{why}");
    let why = refused(|functions| transport(functions).status = 4);
    assert!(why.contains("status 0x4"), "{why}");
    let why = refused(|functions| transport(functions).queues.truncate(2));
    assert!(why.contains("2 queues in the place of 3"), "{why}");
    let why = refused(|functions| transport(functions).msix.table.truncate(63));
    assert!(why.contains("interrupt vectors"), "{why}");
    let why = refused(|functions| transport(functions).queues[0].rings[0] = u64::MAX - 15);
    assert!(why.contains("queues that can't be"), "{why}");
    let why = refused(|functions| {
        let device = transport(functions).device.as_mut().unwrap();
        device.queues[0].taken = vec![16];
    });
    assert!(why.contains("queues that can't be"), "{why}");
    let why = refused(|functions| transport(functions).status = 3);
    assert!(why.contains("without a driver"), "{why}");
}

#[test]
fn a_device_that_needed_a_reset_still_does() {
    let (address, mut functions) = saved(&[UP, Step::NeedsReset(0)]);
    assert_eq!(transport(&mut functions).device, None);
    let mut machine = Machine::new();
    machine.restore(address, &functions).unwrap();
    let (_, mut again) = machine.saved();
    assert_eq!(transport(&mut again).status, 0x4f);
    machine.step(&UP);
    let (_, mut again) = machine.saved();
    assert_eq!(transport(&mut again).status, 0x0f);
}

#[test]
fn each_queue_of_a_restored_device_is_looked_at() {
    let some = Step::BringUp(0, FEATURES | 1 << 32, 0b101, 16);
    let (address, functions) = saved(&[some]);
    let mut machine = Machine::new();
    machine.restore(address, &functions).unwrap();
    assert_eq!(machine.notified(0), [(0, 1), (2, 1)]);
    assert_eq!(machine.notified(1), []);
    machine.step(&UP);
    assert!(machine.notified(0).iter().all(|(_, times)| *times == 0));
}
