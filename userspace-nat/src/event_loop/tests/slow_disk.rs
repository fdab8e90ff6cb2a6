//! Tests of a flow log whose disk accepts nothing for a while: no turn waits for it, lost lines are
//! counted, and no flow is forgotten before its record is written.
use std::{
    collections::HashSet,
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, atomic::Ordering::Relaxed},
    time::Duration,
};

use slipgate_abi::{VmId, VmRow};
use slipgate_model::Subject;

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    record::{Background, FlowLog, Unwritten},
};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// State of the simulated disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It accepts nothing, and the writer blocks.
    Nothing,
    Write,
    /// The engine is dead: nobody writes.
    Fail,
}

#[derive(Clone)]
struct Disk {
    does: Arc<(Mutex<Does>, Condvar)>,
    log: Log,
}

impl Disk {
    fn now(&self, does: Does) {
        *self.does.0.lock().unwrap() = does;
        self.does.1.notify_all();
    }
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (does, changed) = &*self.does;
        let waits = |does: &mut Does| *does == Does::Nothing;
        let does = changed.wait_while(does.lock().unwrap(), waits).unwrap();
        match *does {
            Does::Fail => Err(io::ErrorKind::BrokenPipe.into()),
            Does::Nothing | Does::Write => self.log.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A rig whose log is written by a thread to a disk that takes nothing yet.
fn with_slow_disk(setup: Setup) -> (Rig, Disk) {
    let mut rig = Rig::with(setup);
    let disk = slow_disk_of(&mut rig);
    (rig, disk)
}

/// Gives a rig's log such a disk.
fn slow_disk_of(rig: &mut Rig) -> Disk {
    let disk = Disk {
        does: Arc::new((Mutex::new(Does::Nothing), Condvar::new())),
        log: rig.log.clone(),
    };
    let mut writer = Background::start("a test's", Unwritten::Lost).unwrap();
    writer.set_file(Box::new(disk.clone()));
    rig.engine.log = FlowLog::to(Some(writer.into()));
    rig.engine.log.set_instance(rig.kernel.borrow().instance);
    disk
}

/// VM 1 opens so many flows, and all of them end.
fn open_and_end(rig: &mut Rig, flows: u16) {
    for number in 0..flows {
        rig.guest(1, &udp((GUEST, 5_000 + number), SERVER, b"x"));
    }
    assert_eq!(rig.flows(), usize::from(flows));
    rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(SECOND_NS);
}

fn slots_in_use(rig: &Rig) -> usize {
    rig.kernel.borrow().slots_in_use().len()
}

fn recorded(rig: &Rig) -> (usize, usize) {
    let records = rig.records();
    let ids: HashSet<&str> = records.iter().filter_map(|r| r["id"].as_str()).collect();
    (records.len(), ids.len())
}

#[test]
fn no_turn_waits_for_the_disk_and_each_slot_waits_for_its_record() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    open_and_end(&mut rig, 100);
    // Ended to everybody, but not forgotten.
    assert!(rig.kernel.borrow().flows.is_empty());
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (100, (0, 0)));
    // Others are served as ever.
    rig.connect_from(2, 40_000, 7);
    assert_eq!(slots_in_use(&rig), 101);

    disk.now(Does::Write);
    rig.engine.log.finish(LONG);
    rig.turn();
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (1, (100, 100)));
    assert_eq!(rig.engine.status().records_lost, 0);
    assert_eq!(rig.engine.status().records_written, 100);
}

#[test]
fn what_has_ended_is_no_flow_to_be_cut_while_its_record_waits() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let generation = rig.kernel.borrow().slot(slot).generation().load(Relaxed);
    let mut cut = || {
        let cut = rig.engine.cut(Subject::Flow { slot, generation });
        cut.map(|cut| cut.flows)
    };
    assert_eq!(cut(), Some(1));
    assert_eq!(cut(), Some(0), "it is being cut");
    rig.pass(SECOND_NS);
    assert_eq!(slots_in_use(&rig), 1);
    let what = Subject::Flow { slot, generation };
    assert_eq!(rig.engine.cut(what), None);
    disk.now(Does::Write);
}

#[test]
fn what_was_not_written_when_the_engine_died_is_recorded_by_its_successor() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    open_and_end(&mut rig, 100);
    assert_eq!(recorded(&rig), (0, 0));
    disk.now(Does::Fail);
    let (mut rig, adoption) = rig.restart(&Setup::default());
    assert_eq!(adoption.ended, 100);
    rig.pass(SECOND_NS);
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (0, (100, 100)));
}

#[test]
fn what_was_written_when_the_engine_died_is_not_recorded_again() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    open_and_end(&mut rig, 100);
    // It dies after the write, before it has heard of it.
    disk.now(Does::Write);
    let until = std::time::Instant::now() + LONG;
    while recorded(&rig).0 < 100 {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(slots_in_use(&rig), 100);
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.pass(SECOND_NS);
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (0, (100, 100)));
}

#[test]
fn a_disk_that_takes_nothing_does_not_take_the_table() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    open_and_end(&mut rig, 1_000);
    assert_eq!(slots_in_use(&rig), 2_048 / 8);
    disk.now(Does::Write);
    rig.engine.log.finish(LONG);
    rig.turn();
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (0, (1_000, 1_000)));
}

#[test]
fn lines_that_find_no_room_are_lost_and_counted_and_hold_no_slot() {
    let (mut rig, disk) = with_slow_disk(Setup::default());
    // Far more than the queue takes, a few flows at a time.
    let mut ended = 0;
    while rig.engine.status().records_lost == 0 {
        for number in 0..200 {
            rig.guest(1, &udp((GUEST, 5_000 + number), SERVER, b"x"));
        }
        rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
        rig.pass(3 * SECOND_NS);
        rig.tell(|engine| engine.set_vm(spec(1, &Setup::default())));
        ended += 200;
        assert!(ended < 100_000);
        assert!(slots_in_use(&rig) <= 2_048 / 8);
    }
    disk.now(Does::Write);
    rig.engine.log.finish(LONG);
    rig.turn();
    let (lines, different) = recorded(&rig);
    assert_eq!(lines, different);
    let lost = rig.engine.status().records_lost as usize;
    assert_eq!(lines + lost, ended);
    let tallied = rig.kernel.borrow().stats(0).snapshot().0.records_lost;
    assert_eq!((tallied as usize, slots_in_use(&rig)), (lost, 0));
}

#[test]
fn records_of_orphans_wait_for_a_slow_disk_and_none_is_lost() {
    // Their lines are more than what waits for a disk.
    let setup = || Setup {
        slots: 32_768,
        max_flows: 8_192,
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    for number in 0..3_000 {
        for vm in [1, 2] {
            rig.guest(vm, &udp((GUEST, 5_000 + number), SERVER, b"x"));
        }
    }
    let flows = rig.flows();
    let mut rig = rig.restart_in_steps(&setup());
    // They are in the memory of the process that has died.
    rig.kernel.borrow_mut().flows.clear();
    let disk = slow_disk_of(&mut rig);
    let wakes = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        disk.now(Does::Write);
    });
    rig.engine.end_orphans();
    wakes.join().unwrap();
    assert_eq!((slots_in_use(&rig), recorded(&rig)), (0, (flows, flows)));
    assert_eq!(rig.engine.status().records_lost, 0);
}
