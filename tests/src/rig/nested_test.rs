use super::{ClientReport, NestedEnd, NestedRun, NestedTraces, NestedVmm, judge};

fn passed() -> String {
    let checks = "ok check\n".repeat(ClientReport::CHECKS);
    format!("{checks}end\n")
}

fn end(vmm: NestedVmm, console: &str, stderr: &str, status: Option<i32>) -> NestedEnd {
    let timed_out = status.is_none();
    NestedEnd::of(
        vmm,
        NestedTraces {
            console,
            stderr,
            status,
            timed_out,
        },
    )
}

#[test]
fn a_guest_that_powered_off_passed_if_all_its_checks_did() {
    for vmm in [NestedVmm::Slipgate, NestedVmm::Qemu] {
        assert_eq!(end(vmm, &passed(), "", Some(0)), NestedEnd::Passed);
        let one_failed = format!("FAILED ping\n{}", passed());
        assert_eq!(end(vmm, &one_failed, "", Some(0)), NestedEnd::CheckFailed);
        assert_eq!(end(vmm, "ok\nend\n", "", Some(0)), NestedEnd::CheckFailed);
        assert_eq!(end(vmm, &passed(), "", Some(1)), NestedEnd::Other);
    }
}

#[test]
fn what_broke_is_told_by_what_vmm_and_kernel_say() {
    use NestedVmm::{Qemu, Slipgate};
    let cases = [
        (Qemu, "ok a\n", "", Some(0), NestedEnd::TripleFault),
        (
            Slipgate,
            "ok a\n",
            "vCPU 1: a triple fault",
            Some(121),
            NestedEnd::TripleFault,
        ),
        (Slipgate, "ok a\n", "", Some(0), NestedEnd::Other),
        (
            Qemu,
            "",
            "KVM internal error. Suberror: 3",
            None,
            NestedEnd::KvmGaveUp,
        ),
        (
            Slipgate,
            "",
            "KVM gave up: an exit",
            Some(121),
            NestedEnd::KvmGaveUp,
        ),
        (
            Qemu,
            "Kernel panic - not syncing",
            "",
            Some(0),
            NestedEnd::Panicked,
        ),
        (Slipgate, "ok a\n", "", None, NestedEnd::Stuck),
        (
            Slipgate,
            "ok a\n",
            "the VMM made a system call that its sandbox forbids; a triple fault",
            Some(1),
            NestedEnd::ForbiddenCall,
        ),
    ];
    for (vmm, console, stderr, status, expected) in cases {
        assert_eq!(
            end(vmm, console, stderr, status),
            expected,
            "{vmm:?} {stderr}"
        );
    }
}

#[test]
fn a_run_that_never_ended_is_read_as_such() {
    let run = |number, end| NestedRun {
        number,
        vmm: NestedVmm::Qemu,
        end,
        seconds: 1.5,
    };
    let (begun, ended) = (run(1, None), run(1, Some(NestedEnd::Stuck)));
    let second = run(2, None);
    let report = format!("{begun}\nok noise\n{ended}\n{second}\nnested but no run\n");
    assert_eq!(NestedRun::read(&report), [ended, second]);
}

#[test]
fn only_what_qemus_guest_shows_too_excuses_a_breakdown() {
    use NestedEnd::{CheckFailed, ForbiddenCall, Passed, Stuck, TripleFault};
    use NestedVmm::{Qemu, Slipgate};
    let judged = |ends: &[(NestedVmm, Option<NestedEnd>)]| {
        let runs = ends.iter().zip(1..).map(|((vmm, end), number)| NestedRun {
            number,
            vmm: *vmm,
            end: end.clone(),
            seconds: 5.0,
        });
        judge(&runs.collect::<Vec<_>>())
    };
    let well = (Slipgate, Some(Passed));
    assert_eq!(judged(std::slice::from_ref(&well)), Ok(()));
    assert!(
        judged(&[(Qemu, Some(Passed))]).is_err(),
        "nothing was tried"
    );
    for end in [Some(TripleFault), Some(Stuck), None] {
        let broke = [well.clone(), (Slipgate, end.clone())];
        assert!(judged(&broke).is_err(), "{end:?}");
        let other = [(Qemu, Some(Passed)), (Qemu, Some(NestedEnd::Panicked))];
        assert!(judged(&[&broke[..], &other].concat()).is_err(), "{end:?}");
        let same = [(Qemu, end.clone())];
        assert_eq!(judged(&[&broke[..], &same].concat()), Ok(()), "{end:?}");
        assert!(judged(&[(Slipgate, end.clone()), (Qemu, end)]).is_err());
    }
    for end in [ForbiddenCall, CheckFailed, NestedEnd::Other] {
        let both = [
            well.clone(),
            (Slipgate, Some(end.clone())),
            (Qemu, Some(end)),
        ];
        assert!(judged(&both).is_err());
    }
}
