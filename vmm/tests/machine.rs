//! Machines under KVM, with guests of a few instructions.
use std::{
    fs::File,
    io::{PipeReader, PipeWriter, Read, Write, pipe},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::require_kvm;
use slipgate_vmm::{
    Machine, MachineConfig, MachineError, Outcome, ThreadKind, ThreadSetup,
    report::{Access, Cause, Space},
};

mod bare;
mod payload;
use payload::{Code, ENTRY};

/// Host side of a machine's console.
struct Host {
    typed: PipeWriter,
    printed: PipeReader,
}

fn config(code: &Code, cpus: u8) -> (MachineConfig, Host) {
    let (input, typed) = pipe().unwrap();
    let (config, printed) = bare::machine(code, cpus, Some(input));
    (config, Host { typed, printed })
}

/// Runs a guest to its end. Returns its outcome and its output.
fn run(code: &Code, cpus: u8) -> (Outcome, String) {
    let (config, mut host) = config(code, cpus);
    let machine = Machine::new(config).unwrap();
    let outcome = run_in_time(machine);
    let mut printed = String::new();
    host.printed.read_to_string(&mut printed).unwrap();
    (outcome, printed)
}

/// Runs a machine, and stops one that does not end within 20 s, so that its test fails and ends.
fn run_in_time(machine: Machine) -> Outcome {
    let stop = machine.stop_handle().unwrap();
    let (ended, wait) = std::sync::mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(20)).is_err() {
            stop.stop();
        }
    });
    let outcome = machine.run();
    ended.send(()).ok();
    watchdog.join().unwrap();
    outcome
}

fn cause_and_code(outcome: &Outcome) -> (&Cause, &[u8]) {
    match outcome {
        Outcome::Crashed(report) => (&report.cause, &report.code),
        other => panic!("not a crash: {other:?}"),
    }
}

#[test]
fn prints_on_serial_and_powers_off_by_acpi() {
    require_kvm!();
    let text = b"hello from nowhere\n";
    let code = text
        .iter()
        .fold(Code::new(), |code, &byte| code.out(0x3f8, byte))
        .out(0x600, 0x34)
        .spin();
    let (outcome, printed) = run(&code, 1);
    assert!(matches!(outcome, Outcome::PoweredOff), "{outcome:?}");
    assert_eq!(printed.as_bytes(), text);
}

#[test]
fn string_instructions_move_each_element() {
    require_kvm!();
    let text = b"one instruction\n";
    // mov esi, text; mov ecx, length; rep outsb
    let code = Code::new()
        .place(0x20_0000, text)
        .raw(&[0xbe, 0, 0, 0x20, 0, 0xb9, text.len() as u8, 0, 0, 0])
        .port(0x3f8)
        .raw(&[0xf3, 0x6e])
        // mov edi, 0x201000; mov ecx, 3; rep insw from a port without a device, then the words
        // read.
        .raw(&[0xbf, 0, 0x10, 0x20, 0, 0xb9, 3, 0, 0, 0])
        .port(0x1234)
        .raw(&[0x66, 0xf3, 0x6d])
        .load(0x20_1002)
        .expect_eax(0xffff_ffff)
        .spin();
    let (outcome, printed) = run(&code, 1);
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{outcome:?}");
    assert_eq!(printed.as_bytes(), text);
}

#[test]
fn gives_its_exit_status_as_it_is() {
    require_kvm!();
    let (outcome, _) = run(&Code::new().out(0xf4, 77).spin(), 1);
    assert!(matches!(outcome, Outcome::GuestExit(77)), "{outcome:?}");
}

#[test]
fn resets_by_the_keyboard_controller() {
    require_kvm!();
    let (outcome, _) = run(&Code::new().out(0x64, 0xfe).spin(), 1);
    assert!(matches!(outcome, Outcome::Reset), "{outcome:?}");
}

#[test]
fn a_triple_fault_is_reported_with_registers_and_code() {
    require_kvm!();
    // Without an IDT, ud2 is an exception that can't be delivered.
    let code = Code::new().out(0x80, 1).eax(0xfeed_beef);
    let fault = code.here();
    let (outcome, _) = run(&code.raw(&[0x0f, 0x0b]).spin(), 1);
    let (cause, bytes) = cause_and_code(&outcome);
    assert_eq!(*cause, Cause::TripleFault);
    let Outcome::Crashed(report) = &outcome else {
        unreachable!()
    };
    let last = Access {
        space: Space::Port,
        write: true,
        address: 0x80,
        size: 1,
    };
    assert_eq!(report.last_access, Some(last));
    let text = report.to_string();
    // On AMD, KVM resets the CPU first; the report says so.
    if !text.contains("those of a reset CPU") {
        let registers = report.registers.as_ref().unwrap();
        assert_eq!(registers.general.rax, 0xfeed_beef);
        assert_eq!(registers.general.rip, u64::from(fault));
        assert_eq!(registers.special.cr0 & 1, 1, "protected mode");
        assert_eq!(bytes[..4], [0x0f, 0x0b, 0xeb, 0xfe]);
        assert!(text.contains("00000000feedbeef"), "{text}");
    }
}

#[test]
fn registers_of_features_that_are_not_offered_are_kept_from_the_guest() {
    require_kvm!();
    let mut options = std::fs::File::options();
    let kvm = options.read(true).write(true).open("/dev/kvm").unwrap();
    if !slipgate_vmm::kvm::check(kvm.into())
        .unwrap()
        .filters_registers
    {
        println!("skipped: registers_of_features_that_are_not_offered: KVM has no filter for them");
        return;
    }
    let read = |register: u32| {
        let number = register.to_le_bytes();
        let code = Code::new().raw(&[0xb9]).raw(&number).raw(&[0x0f, 0x32]);
        run(&code.out(0xf4, 7).spin(), 1).0
    };
    let time = read(0x10);
    assert!(matches!(time, Outcome::GuestExit(7)), "{time:?}");
    // A count of SMIs, a performance counter, energy: KVM would answer each. Without an IDT the fault
    // can't be delivered.
    for register in [0x34, 0xC1, 0x606] {
        let outcome = read(register);
        let cause = cause_and_code(&outcome).0;
        assert_eq!(*cause, Cause::TripleFault, "register {register:#x}");
    }
}

#[test]
fn what_kvm_cannot_emulate_is_reported() {
    require_kvm!();
    // There is no memory, so KVM would have to emulate, but finds no instruction.
    let code = Code::new().raw(&[0xb8, 0, 0, 0, 0xd0, 0xff, 0xe0]);
    let (outcome, _) = run(&code, 1);
    let (cause, bytes) = cause_and_code(&outcome);
    assert!(
        matches!(cause, Cause::InternalError { suberror: 1, .. }),
        "{outcome:?}"
    );
    assert!(bytes.is_empty(), "there is nothing to read");
    let Outcome::Crashed(report) = &outcome else {
        unreachable!()
    };
    assert!(
        report.to_string().contains("rip 00000000d0000000"),
        "{report}"
    );
}

#[test]
fn other_cpus_start_by_init_and_sipi() {
    require_kvm!();
    // 16 bit: lock inc byte [0x9000]; hlt; jmp back to hlt.
    let startup = [0xf0, 0xfe, 0x06, 0x00, 0x90, 0xf4, 0xeb, 0xfd];
    let icr_low = 0xfee0_0300;
    let code = Code::new()
        .place(0x8000, &startup)
        .store(icr_low, 0xc4500)
        .store(icr_low, 0xc4608)
        .await_byte(0x9000, 3)
        .out(0xf4, 3)
        .spin();
    let (outcome, _) = run(&code, 4);
    assert!(matches!(outcome, Outcome::GuestExit(3)), "{outcome:?}");
}

#[test]
fn where_nothing_is_reads_are_all_ones() {
    require_kvm!();
    let code = Code::new()
        .store(0xd000_0000, 0)
        .load(0xd000_0000)
        .expect_eax(0xffff_ffff)
        .spin();
    let (config, _host) = config(&code, 1);
    let machine = Machine::new(config).unwrap();
    let counters = machine.counters();
    let outcome = run_in_time(machine);
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{outcome:?}");
    let counted = counters.snapshot();
    assert_eq!(
        (counted.vcpus[0].mmio_reads, counted.vcpus[0].mmio_writes),
        (1, 1)
    );
    assert_eq!(
        (counted.vcpus[0].port_writes, counted.vcpus[0].unclaimed),
        (1, 2)
    );
    let json = serde_json::to_value(&counted).unwrap();
    assert_eq!(json["vcpus"][0]["mmio_reads"], 1);
}

#[test]
fn the_host_bridge_is_seen_by_ports_and_by_ecam() {
    require_kvm!();
    // mov ebx, eax; then the same by 0xCF8/0xCFC; sub eax, ebx; must be 0, and EBX not all ones.
    let code = Code::new()
        .load(0xe000_0000)
        .raw(&[0x89, 0xc3])
        .port(0xcf8)
        .eax(0x8000_0000)
        .raw(&[0xef])
        .port(0xcfc)
        .raw(&[0xed, 0x29, 0xd8])
        // cmp ebx, -1; jne +2; mov al, 1
        .raw(&[0x83, 0xfb, 0xff, 0x75, 0x02, 0xb0, 0x01])
        .expect_eax(0)
        .spin();
    let (outcome, _) = run(&code, 1);
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{outcome:?}");
}

#[test]
fn what_is_typed_arrives() {
    require_kvm!();
    // again: in al, LSR; test al, 1; jz again; in al, data; out data, al; cmp al, 'q'; jne again
    let code = Code::new()
        .out(0x3f9, 1)
        .port(0x3fd)
        .raw(&[0xec, 0xa8, 0x01, 0x74, 0xfb, 0xb2, 0xf8, 0xec, 0xee])
        .raw(&[0xb2, 0xfd, 0x3c, b'q', 0x75, 0xf1])
        .out(0x600, 0x34)
        .spin();
    let (config, mut host) = config(&code, 1);
    let machine = Machine::new(config).unwrap();
    let counters = machine.counters();
    let typed = format!("{}q", "0123456789".repeat(20));
    host.typed.write_all(typed.as_bytes()).unwrap();
    let outcome = run_in_time(machine);
    assert!(matches!(outcome, Outcome::PoweredOff), "{outcome:?}");
    let mut printed = String::new();
    host.printed.read_to_string(&mut printed).unwrap();
    assert_eq!(printed, typed);
    let serial = counters.snapshot().serial;
    assert_eq!((serial.input_bytes, serial.output_bytes), (201, 201));
    assert!(serial.interrupts > 0, "received data interrupts");
}

#[test]
fn a_spinning_guest_is_stopped_at_once() {
    require_kvm!();
    // The other CPUs wait for a SIPI that never comes.
    let (config, _host) = config(&Code::new().spin(), 4);
    let machine = Machine::new(config).unwrap();
    let stop = machine.stop_handle().unwrap();
    let stopping = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        let at = Instant::now();
        stop.stop();
        at
    });
    let outcome = machine.run();
    let took = stopping.join().unwrap().elapsed();
    assert!(matches!(outcome, Outcome::Stopped), "{outcome:?}");
    assert!(took < Duration::from_millis(500), "{took:?}");
}

#[test]
fn each_thread_is_set_up_first_and_a_refusal_is_an_error() {
    require_kvm!();
    let code = Code::new().out(0xf4, 0).spin();
    let (mut good, _host) = config(&code, 2);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let seen_by_setup = seen.clone();
    good.threads = ThreadSetup::new(move |kind| {
        seen_by_setup.lock().unwrap().push(kind);
        Ok(())
    });
    assert!(matches!(
        run_in_time(Machine::new(good).unwrap()),
        Outcome::GuestExit(0)
    ));
    let seen = seen.lock().unwrap();
    let of = |kind| seen.iter().filter(|&&k| k == kind).count();
    assert_eq!(of(ThreadKind::Vcpu), 2);
    assert!(of(ThreadKind::Device) >= 2, "the console's two");

    let (mut bad, _host) = config(&code, 2);
    bad.threads = ThreadSetup::new(|kind| match kind {
        ThreadKind::Vcpu => Err(std::io::Error::other("not this one")),
        _ => Ok(()),
    });
    let Err(error) = Machine::new(bad) else {
        panic!("a vCPU runs without its setup")
    };
    assert!(matches!(error, MachineError::Host { .. }), "{error:?}");
}

#[test]
fn a_machine_that_never_ran_ends_its_threads() {
    require_kvm!();
    let (config, mut host) = config(&Code::new().spin(), 2);
    drop(Machine::new(config).unwrap());
    // The console's writer held the other end.
    assert_eq!(host.printed.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn what_is_no_kvm_is_refused() {
    let (config, _host) = match File::open("/dev/kvm") {
        Ok(_) => config(&Code::new().spin(), 1),
        Err(_) => return slipgate_testbed::skipped!("it needs /dev/kvm"),
    };
    let config = MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        kvm: File::open("/dev/null").unwrap().into(),
        ..config
    };
    let Err(error) = Machine::new(config) else {
        panic!("/dev/null made a machine")
    };
    assert!(error.to_string().contains("is it /dev/kvm?"), "{error}");
}

const _: () = assert!(ENTRY >= 1 << 20);

#[test]
fn more_memory_than_a_cpu_can_address_is_refused() {
    require_kvm!();
    let (mut config, _host) = config(&Code::new().spin(), 1);
    config.memory_bytes = 1 << 52;
    let refused = Machine::new(config).err().unwrap();
    assert!(
        matches!(refused, MachineError::AddressBits { bytes, .. } if bytes == 1 << 52),
        "{refused}"
    );
}

#[test]
fn clocks_tell_time_without_the_hypervisors_help() {
    require_kvm!();
    // in eax, dx; mov ebx, eax; in eax, dx; sub eax, ebx: ticks of the PM timer between two reads.
    let code = Code::new()
        .port(0x608)
        .raw(&[0xed, 0x89, 0xc3, 0xed, 0x29, 0xd8])
        // Not backwards, and no more than a second: cmp eax, 3579545; seta al; mov bl, al.
        .raw(&[0x3d])
        .raw(&3_579_545u32.to_le_bytes())
        .raw(&[0x0f, 0x97, 0xc0, 0x88, 0xc3])
        // The clock's century: out 0x70, 0x32; in al, 0x71; BCD 20; sub al, 0x20; or al, bl.
        .out(0x70, 0x32)
        .port(0x71)
        .raw(&[0xec, 0x2c, 0x20, 0x08, 0xd8])
        .port(0xf4)
        .raw(&[0xee])
        .spin();
    let (outcome, _) = run(&code, 1);
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{outcome:?}");
}
