use std::fs::File;

use super::*;

#[test]
fn what_is_no_tun_is_known_by_what_the_kernel_says_of_it() {
    assert!(is_tun(
        "pos:\t0\nflags:\t02100002\nmnt_id:\t28\nino:\t9\niff:\ttap0\n"
    ));
    assert!(!is_tun(
        "pos:\t0\nflags:\t02100002\nmnt_id:\t28\nino:\t9\ntfd: iff:\n"
    ));
    let file = File::open("/proc/self/exe").unwrap();
    let why = name_of(file.into()).unwrap_err().to_string();
    assert!(why.contains("another file's"), "{why}");
}
