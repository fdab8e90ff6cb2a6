use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use super::*;

/// Starts a shell, and waits until it has printed a line.
fn shell_that_has_said(script: &str) -> Child {
    let mut shell = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(shell.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    shell
}

#[test]
fn a_child_that_has_ended_is_counted_among_its_parents_times() {
    // The outer shell starts one, which works and ends, and waits.
    let script =
        r#"sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo done; read line"#;
    let mut shell = shell_that_has_said(script);
    let own = cpu_time::of_threads(shell.id(), |_| true);
    let all = cpu_time(shell.id());
    assert!(all >= own + Duration::from_millis(50), "{own:?} {all:?}");
    drop(shell.stdin.take());
    shell.wait().unwrap();
    assert_eq!(cpu_time(shell.id()), Duration::ZERO, "it is gone");
}

#[test]
fn a_child_that_runs_is_counted_too() {
    let script =
        r#"sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; read line'; true"#;
    let mut shell = shell_that_has_said(script);
    let all = cpu_time(shell.id());
    assert!(all >= Duration::from_millis(50), "{all:?}");
    drop(shell.stdin.take());
    shell.wait().unwrap();
}
