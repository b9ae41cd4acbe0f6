"""Django's MySQL engine on PyMySQL, where mysqlclient is not installed.

An engine and no call in the settings, because tests make settings of their own for other processes.
"""
