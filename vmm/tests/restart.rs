//! Machines that begin anew when their guest resets them.
use std::{io::Read, sync::atomic::AtomicBool, thread, time::Duration};

use slipgate_testbed::require_kvm;
use slipgate_vmm::{Machine, Outcome, SnapshotFiles, snapshot::SnapshotError};

mod bare;
mod payload;
use payload::Code;

/// Where a guest leaves a trace of its life.
const TRACE: u32 = 0x20_0000;
const HOST_BRIDGE_COMMAND: u32 = 0x8000_0804;
/// PCI's configuration address and data.
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;

/// Runs a guest that may restart so many times. Returns its outcome, its output, and the number of
/// times that it has reset itself.
fn run(code: &Code, cpus: u8, restarts: usize) -> (Outcome, String, usize) {
    let (config, mut printed) = bare::machine(code, cpus, None);
    let machine = Machine::restartable(config).unwrap();
    let stop = machine.stop_handle().unwrap();
    let (ended, wait) = std::sync::mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(20)).is_err() {
            stop.stop();
        }
    });
    let mut resets = 0;
    let outcome = machine.run_again(|outcome| {
        assert!(outcome.is_reset());
        resets += 1;
        resets <= restarts
    });
    ended.send(()).ok();
    watchdog.join().unwrap();
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    (outcome, text, resets)
}

/// Prints a byte; ends with status 9 where there is a trace of a former life in memory or in the
/// first device's configuration; leaves one in both.
fn life(byte: u8) -> Code {
    let at = |code: Code, offset: u32| {
        let code = code.eax(HOST_BRIDGE_COMMAND + offset).port(ADDRESS);
        code.raw(&[0xef]).port(DATA)
    };
    // cmp eax, 0; je over the ten bytes of mov edx, 0xf4; mov al, 9; out dx, al; jmp $
    let none = [
        0x83, 0xf8, 0x00, 0x74, 0x0a, 0xba, 0xf4, 0, 0, 0, 0xb0, 9, 0xee, 0xeb, 0xfe,
    ];
    let code = Code::new().out(0x3f8, byte).load(TRACE).raw(&none);
    // in eax, dx; and eax, 7: the command register.
    let code = at(code, 0).raw(&[0xed, 0x83, 0xe0, 0x07]).raw(&none);
    // out dx, eax: decoding and bus mastering on.
    let code = at(code, 0).eax(7).port(DATA).raw(&[0xef]);
    code.store(TRACE, 1)
}

#[test]
fn a_reset_begins_the_machine_anew_without_a_trace() {
    require_kvm!();
    for cpus in [1, 2] {
        let (outcome, printed, resets) = run(&life(b'a').out(0x64, 0xfe).spin(), cpus, 3);
        assert!(matches!(outcome, Outcome::Reset), "{outcome:?} {printed}");
        assert_eq!((printed.as_str(), resets), ("aaaa", 4));
    }
}

#[test]
fn a_triple_fault_begins_it_anew_too() {
    require_kvm!();
    let (outcome, printed, resets) = run(&life(b'a').raw(&[0x0f, 0x0b]).spin(), 1, 2);
    assert!(
        matches!(&outcome, Outcome::Crashed(_)) && outcome.is_reset(),
        "{outcome:?}"
    );
    assert_eq!((printed.as_str(), resets), ("aaa", 3));
}

/// The string instruction goes on after the byte that resets the machine: what is left of it must not
/// move the next life's first instruction.
#[test]
fn a_reset_in_the_middle_of_a_string_does_so_too() {
    require_kvm!();
    const STRING: u32 = 0x21_0000;
    // The first byte resets; the second is none that the port knows. Some pages of them.
    for bytes in [2_u32, 5_000, 20_000] {
        // mov esi, STRING; mov ecx, bytes; cld; rep outsb
        let outs = [
            &[0xbe][..],
            &STRING.to_le_bytes(),
            &[0xb9],
            &bytes.to_le_bytes(),
        ]
        .concat();
        let code = life(b'a')
            .store(STRING, 0x0000_00fe)
            .port(0x64)
            .raw(&outs)
            .raw(&[0xfc, 0xf3, 0x6e])
            .spin();
        let (outcome, printed, resets) = run(&code, 1, 3);
        assert!(matches!(outcome, Outcome::Reset), "{outcome:?} {printed}");
        assert_eq!((printed.as_str(), resets), ("aaaa", 4));
    }
}

#[test]
fn orders_during_a_reset_are_refused_at_once_and_the_next_life_takes_them() {
    require_kvm!();
    let (config, _printed) = bare::machine(&life(b'a').out(0x64, 0xfe).spin(), 2, None);
    let machine = Machine::restartable(config).unwrap();
    let (control, stop) = (machine.control(), machine.stop_handle().unwrap());
    let mut resets = 0;
    let outcome = machine.run_again(|_| {
        resets += 1;
        // Of this thread: an order that waited for the end of the reset would never return.
        let files = || {
            let [state, memory] = [(), ()].map(|()| tempfile::tempfile().unwrap());
            SnapshotFiles { state, memory }
        };
        for refused in [
            control.pause(),
            control.resume(),
            control.snapshot(&files(), &AtomicBool::new(false)),
        ] {
            assert!(
                matches!(refused, Err(SnapshotError::Resetting)),
                "{refused:?}"
            );
        }
        if resets == 3 {
            stop.stop();
        }
        true
    });
    assert!(matches!(outcome, Outcome::Stopped), "{outcome:?}");
}

/// Whoever pauses and resumes meanwhile never has the life go on that a vCPU has ended.
#[test]
fn orders_at_any_time_have_no_life_outlive_its_end() {
    require_kvm!();
    // Behind the reset it prints what no life may.
    let code = life(b'a').out(0x64, 0xfe).out(0x3f8, b'!').spin();
    let (config, mut printed) = bare::machine(&code, 2, None);
    let machine = Machine::restartable(config).unwrap();
    let control = machine.control();
    let orders = thread::spawn(move || {
        let mut paused = 0;
        loop {
            match control.pause() {
                Ok(()) => paused += 1,
                Err(SnapshotError::Resetting) => continue,
                Err(SnapshotError::Ended) => break paused,
                Err(e) => panic!("{e}"),
            }
            match control.resume() {
                Ok(()) | Err(SnapshotError::Resetting) => {}
                Err(SnapshotError::Ended) => break paused,
                Err(e) => panic!("{e}"),
            }
        }
    });
    let mut resets = 0;
    let outcome = machine.run_again(|_| {
        resets += 1;
        resets <= 200
    });
    assert!(matches!(outcome, Outcome::Reset), "{outcome:?}");
    orders.join().unwrap();
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    assert_eq!(text, "a".repeat(201));
}

#[test]
fn other_ends_are_ends() {
    require_kvm!();
    let (outcome, _, resets) = run(&life(b'a').out(0xf4, 77).spin(), 1, 3);
    assert!(matches!(outcome, Outcome::GuestExit(77)), "{outcome:?}");
    assert_eq!(resets, 0);
}

#[test]
fn a_machine_that_resets_without_end_is_stopped_at_once() {
    require_kvm!();
    let (config, _printed) = bare::machine(&life(b'a').out(0x64, 0xfe).spin(), 2, None);
    let machine = Machine::restartable(config).unwrap();
    let stop = machine.stop_handle().unwrap();
    let mut resets = 0;
    let outcome = machine.run_again(|_| {
        resets += 1;
        if resets == 5 {
            stop.stop();
        }
        true
    });
    assert!(matches!(outcome, Outcome::Stopped), "{outcome:?}");
    // The stop is heard, however soon the guest resets itself again.
    assert!((5..=6).contains(&resets), "{resets}");
}
