use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};

use super::*;

fn report(cause: Cause) -> Report {
    let mut registers = Registers {
        general: kvm_regs {
            rip: 0x10_1234,
            ..Default::default()
        },
        special: kvm_sregs {
            cr2: 0xdead_0000,
            ..Default::default()
        },
    };
    registers.special.cs = kvm_segment {
        selector: 8,
        limit: 0xffff_ffff,
        present: 1,
        l: 1,
        ..Default::default()
    };
    Report {
        vcpu: 3,
        cause,
        registers: Some(registers),
        code: vec![0x0f, 0x0b],
        last_access: Some(Access {
            space: Space::Port,
            write: true,
            address: 0x3f8,
            size: 1,
        }),
    }
}

#[test]
fn a_triple_fault_says_where_and_what_to_do() {
    let text = report(Cause::TripleFault).to_string();
    for expected in [
        "vCPU 3: a triple fault",
        "what to do: look at what the guest printed last",
        "rip 0000000000101234",
        "cr2 00000000dead0000",
        "cs 0008 base 0000000000000000 limit ffffffff type 0 ring 0 64 bit",
        "ss 0000 (not usable)",
        "code at rip: 0f 0b",
        "wrote 1 bytes at port 0x3f8",
    ] {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
    assert!(!text.contains("reset CPU"));
}

#[test]
fn a_cpu_that_kvm_reset_is_said_to_be_one() {
    let mut report = report(Cause::TripleFault);
    let registers = report.registers.as_mut().unwrap();
    registers.general.rip = 0xfff0;
    registers.special.cs.selector = 0xf000;
    assert!(report.to_string().contains("those of a reset CPU"));
}

#[test]
fn an_internal_error_shows_its_data_in_one_line() {
    let cause = Cause::InternalError {
        suberror: 1,
        data: vec![0x1f, 2],
    };
    let text = cause.to_string();
    assert_eq!(
        text,
        "KVM gave up: it can't emulate an instruction (suberror 1); data 0x1f 0x2"
    );
}
