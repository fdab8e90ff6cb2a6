use super::newest;

#[test]
fn the_newest_kernel_is_that_with_the_highest_numbers() {
    let listed = "linux-image-6.1.0-9-cloud-amd64\n\
                  linux-image-6.1.0-56-cloud-amd64-unsigned\n\
                  linux-image-6.1.0-56-cloud-amd64\n\
                  linux-image-6.1.0-57-amd64\n\
                  linux-image-6.1.0-47-cloud-amd64\n";
    assert_eq!(newest(listed), Some("linux-image-6.1.0-56-cloud-amd64"));
    let listed = "linux-image-6.12.99+deb12-cloud-amd64\nlinux-image-6.12.117+deb12-cloud-amd64\n";
    assert_eq!(
        newest(listed),
        Some("linux-image-6.12.117+deb12-cloud-amd64")
    );
    assert_eq!(newest("linux-image-6.1.0-57-amd64\n"), None);
}
