use std::os::unix::fs::symlink;

use super::*;

#[test]
fn a_log_file_is_a_regular_file_and_no_link() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("log");
    open_log(&file).unwrap().write_all(b"a line\n").unwrap();
    open_log(&file).unwrap().write_all(b"another\n").unwrap();
    let said = std::fs::read_to_string(&file).unwrap();
    assert_eq!(said, "a line\nanother\n");

    let link = dir.path().join("link");
    symlink(&file, &link).unwrap();
    for path in [link.as_path(), Path::new("/dev/null"), dir.path()] {
        let refused = open_log(path).unwrap_err().to_string();
        assert!(refused.contains("--log-file"), "{refused}");
    }
}

#[test]
fn what_was_said_is_read_without_waiting_for_more() {
    let mut child = Command::new("sh")
        .args([
            "-c",
            "echo a message of a test >&2; echo said; exec cat >/dev/null",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let messages = Messages::of(child.stderr.take().unwrap()).unwrap();
    let mut said = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    BufReader::new(stdout).read_line(&mut said).unwrap();
    assert!(messages.pass_some_on(), "it has not ended");
    let rest = (&messages.pipe).read(&mut [0; 1]).unwrap_err();
    assert_eq!(rest.kind(), io::ErrorKind::WouldBlock);
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(!messages.pass_some_on());
}
