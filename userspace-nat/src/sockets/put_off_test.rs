use std::os::fd::OwnedFd;

use super::*;

fn socket() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

fn nothing() -> PutOff {
    PutOff::new(Rc::new(HostSockets::new(1 << 20)))
}

#[test]
fn what_is_put_off_is_done_after_a_time_or_when_there_is_much() {
    let mut put_off = nothing();
    assert!(!put_off.is_due(0), "there is nothing");
    put_off.acknowledge(1);
    assert!(!put_off.is_due(5), "its time begins");
    assert!(!put_off.is_due(4 + LONGEST_NS));
    assert!(put_off.is_due(5 + LONGEST_NS));
    let mut put_off = nothing();
    for _ in 1..MOST {
        put_off.host.closing().push(socket());
        assert!(!put_off.is_due(0));
    }
    put_off.host.closing().push(socket());
    assert!(put_off.is_due(0));
    let mut put_off = nothing();
    for key in 1..MOST as u32 {
        put_off.acknowledge(key);
        put_off.acknowledge(key);
        assert!(!put_off.is_due(0));
    }
    put_off.acknowledge(0);
    assert!(put_off.is_due(0));
}
