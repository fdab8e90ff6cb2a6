use super::{CpuidError, MachineError, blamed_flag, unless_stub};

#[test]
fn a_stub_is_no_guest_and_the_error_says_what_builds_one() {
    assert_eq!(unless_stub(b"ELF").unwrap(), b"ELF");
    let error = unless_stub(b"").unwrap_err().to_string();
    assert!(error.contains("`cargo xtask build`"), "{error}");
}

#[test]
fn what_a_template_lacks_is_the_fault_of_the_flag_that_chose_it() {
    for (is_restored, flag) in [(false, "--cpu-template"), (true, "--restore")] {
        let lacks = CpuidError::Lacks {
            template: "x86-64-v3",
            features: "avx2".to_owned(),
        };
        let error = anyhow::Error::new(MachineError::Cpuid(lacks));
        assert_eq!(blamed_flag(&error, is_restored).as_deref(), Some(flag));
    }
}
