#!/bin/sh
# Process 1 of new mount and pid namespaces: make ROOT the root folder, then run the command.
# Arguments: ROOT, then `--read-only SOURCE TARGET` or `--writable SOURCE TARGET` for each folder to show, `--`, the command.
# The root is changed with pivot_root, because what is run in a container later (docker exec, health checks) joins the
# mount namespace and gets its root: with chroot that would still be the machine's.
set -eu
root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$root$3"
  mount --bind "$2" "$root$3"
  if [ "$1" = --read-only ]; then mount -o remount,bind,ro "$root$3"; fi
  shift 3
done
shift
cat /etc/resolv.conf > "$root/run/resolv.conf"
ln -sf /run/resolv.conf "$root/etc/resolv.conf"
mkdir -p "$root/old"
cd "$root"
pivot_root . old
cd /
umount -l /old
ip link set lo up
exec "$@"
