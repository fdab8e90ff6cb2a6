use std::error::Error;

use super::*;

/// Returns an error and its causes, as a user sees them.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(this) = cause {
        text += &format!(": {this}");
        cause = this.source();
    }
    text
}

#[test]
fn each_cause_is_told_once() {
    let io = || io::Error::other("no luck");
    let memory = || vm_memory::GuestMemoryError::GuestAddressOverflow;
    let net = NetError::Host {
        what: "set io_uring up",
        source: io(),
    };
    let what = "the kernel";
    let errors = [
        MachineError::from(net),
        BootError::Read { what, source: io() }.into(),
        BootError::Write {
            what,
            source: memory(),
        }
        .into(),
        AcpiError::Write(memory()).into(),
        MachineError::host("starting a thread")(io()),
    ];
    for error in errors {
        let text = in_full(&error);
        for cause in [in_full(&io()), in_full(&memory()), "could not set".into()] {
            assert!(text.matches(&cause).count() <= 1, "{text}");
        }
        assert!(text.contains(": "), "{text}");
    }
}
