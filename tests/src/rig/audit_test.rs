use super::*;

const CONSOLE: &str = "\
[    0.000000] audit: type=2000 audit(1763.1:1): state=initialized audit_enabled=1 res=1
[   12.5] audit: type=1326 audit(1763.2:7): auid=4294967295 uid=2080374785 gid=2080374785 \
ses=4294967295 subj=unconfined pid=411 comm=\"vcpu0\" exe=\"/bin/slipgate\" sig=31 arch=c000003e \
syscall=41 compat=0 ip=0x7f2a10 code=0x80000000
[   13.0] audit: type=1326 audit(1763.3:8): pid=412 comm=\"net0\" syscall=99999 ip=0x1
";

#[test]
fn a_forbidden_call_is_told_by_thread_name_and_number() {
    let told = forbidden_calls(CONSOLE);
    assert_eq!(told.len(), 2, "{told:?}");
    let by_name = name(41).is_some();
    let call = if by_name {
        "socket"
    } else {
        "no call of x86-64's"
    };
    assert_eq!(
        told[0],
        format!("vcpu0 (process 411): {call}, number 41, at 0x7f2a10")
    );
    assert_eq!(
        told[1],
        "net0 (process 412): no call of x86-64's, number 99999, at 0x1"
    );
}
